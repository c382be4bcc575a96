/* Products of a few rows with a matrix, which may be kept in few bits: y = x W^T, for processors with AVX2 and FMA.
 *
 * Decoding reads every weight once for each token, so what counts is that weights become float32 numbers as fast as
 * memory gives them. Activations stay float32 (for 4 bits, they become 16-bit numbers), sums too. Sums are added up in
 * one order however many rows there are, so a row's result does not depend on those beside it.
 *
 * Legend: M rows, N outputs, K inputs, G groups (K / 32).
 */
#include "native.h"

enum { ROWS = 4, PARTS = 3, GROUP = 32, PIECE = 16 };
enum { LINE = 64, AHEAD = 2048 }; /* bytes, fetched by hand: a processor takes a while to see where reading goes */

/* Activations as whole numbers times a scale for each group, and the sums of these products; where something is not
 * finite, neither is the sum. */
typedef struct {
    int16_t *numbers; /* [M, K] */
    float *scales;    /* [M, G] */
    float *totals;    /* [M, G] */
} Rounded;

typedef struct {
    const float *x;     /* [M, K] */
    const void *w;      /* [N, K] */
    const void *scales; /* of int8: bfloat16 [N]; of int4: bfloat16 [N, G, 2], the step and what number 8 stands for */
    Rounded rounded;    /* for int4: x once more */
    float *y;           /* [M, N] */
    long rows, size, width;
} Product;

/* Outputs `first` to `end` of the M rows (at most ROWS) that begin at `row`. */
typedef void (*Kernel)(const Product *p, long row, int count, long first, long end);

/* Eight weights, and one, as float32 (those of more bits are in native.h) */
INLINE __m256 eight_int8(const int8_t *w) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)));
}
INLINE float one_int8(const int8_t *w) { return (float)*w; }

/* What an output is multiplied by */
INLINE float no_scale(const Product *p, long n) { return (void)p, (void)n, 1.0f; }
INLINE float scale_of_output(const Product *p, long n) { return one_bfloat16((const uint16_t *)p->scales + n); }

/* A copy for each number of rows, in which the compiler keeps the sums in registers. */
#define BY_COUNT(kind)                                                                                                 \
    AVX2 static void kind##_rows(const Product *p, long row, int count, long first, long end) {                        \
        switch (count) {                                                                                               \
        case 1: kind##_count(p, row, 1, first, end); break;                                                            \
        case 2: kind##_count(p, row, 2, first, end); break;                                                            \
        case 3: kind##_count(p, row, 3, first, end); break;                                                            \
        default: kind##_count(p, row, 4, first, end);                                                                  \
        }                                                                                                              \
    }

/* Numbers of one weight each: a few sums of eight lanes for every product, so that additions need not wait. */
#define PLAIN_KERNEL(kind, type, scale_of)                                                                             \
    INLINE void kind##_count(const Product *p, long row, const int count, long first, long end) {                      \
        const long width = p->width, whole = width / (PARTS * LANES) * (PARTS * LANES);                                \
        for (long n = first; n < end; n++) {                                                                           \
            const type *w = (const type *)p->w + n * width;                                                            \
            const float *x = p->x + row * width;                                                                       \
            __m256 sums[ROWS][PARTS];                                                                                  \
            EACH(int m = 0; m < count; m++)                                                                            \
                EACH(int part = 0; part < PARTS; part++) sums[m][part] = _mm256_setzero_ps();                          \
            for (long k = 0; k < whole; k += PARTS * LANES) {                                                          \
                for (unsigned long n = 0; n < PARTS * LANES * sizeof *w; n += LINE)                                    \
                    _mm_prefetch((const char *)(w + k) + n + AHEAD, _MM_HINT_T0);                                      \
                EACH(int part = 0; part < PARTS; part++) {                                                             \
                    const long at = k + part * LANES;                                                                  \
                    const __m256 eight = eight_##kind(w + at);                                                         \
                    EACH(int m = 0; m < count; m++)                                                                    \
                        sums[m][part] = _mm256_fmadd_ps(eight, _mm256_loadu_ps(x + m * width + at), sums[m][part]);    \
                }                                                                                                      \
            }                                                                                                          \
            const long lanes = width / LANES * LANES;                                                                  \
            for (long k = whole; k < lanes; k += LANES) {                                                              \
                const __m256 eight = eight_##kind(w + k);                                                              \
                EACH(int m = 0; m < count; m++)                                                                        \
                    sums[m][0] = _mm256_fmadd_ps(eight, _mm256_loadu_ps(x + m * width + k), sums[m][0]);               \
            }                                                                                                          \
            EACH(int m = 0; m < count; m++) {                                                                          \
                float sum = sum8(_mm256_add_ps(_mm256_add_ps(sums[m][0], sums[m][1]), sums[m][2]));                    \
                for (long k = lanes; k < width; k++) sum += one_##kind(w + k) * x[m * width + k];                      \
                p->y[(row + m) * p->size + n] = sum * scale_of(p, n);                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    BY_COUNT(kind)

PLAIN_KERNEL(float32, float, no_scale)
PLAIN_KERNEL(bfloat16, uint16_t, no_scale)
PLAIN_KERNEL(int8, int8_t, scale_of_output)

/* 4 bits: of a group, byte j holds number j low and number j + 16 high. With a step and the middle that number 8 stands
 * for, its sum is step * sum(number x) + (middle - 8 step) * sum(x). Activations are whole numbers of 16 bits times a
 * scale for each group (`Rounded`), whose products with 4 bits add up exactly in 32. */
INLINE void int4_count(const Product *p, long row, const int count, long first, long end) {
    const long width = p->width, groups = width / GROUP, whole = groups / LANES * LANES;
    const __m256i low = _mm256_set1_epi16(15);
    const int16_t *x = p->rounded.numbers + row * width;
    const float *units = p->rounded.scales + row * groups, *totals = p->rounded.totals + row * groups;
    for (long n = first; n < end; n++) {
        const uint8_t *w = (const uint8_t *)p->w + n * (width / 2);
        const uint32_t *scales = (const uint32_t *)p->scales + n * groups; /* step low, middle high */
        __m256 sums[ROWS];
        EACH(int m = 0; m < count; m++) sums[m] = _mm256_setzero_ps();
        for (long g = 0; g < groups; g++) {
            _mm_prefetch((const char *)(w + g * (GROUP / 2)) + AHEAD, _MM_HINT_T0);
            const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w + g * (GROUP / 2))));
            const __m256i front = _mm256_and_si256(pairs, low), back = _mm256_srli_epi16(pairs, 4);
            const __m256 step = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_set1_epi32((int)scales[g]), 16));
            EACH(int m = 0; m < count; m++) {
                const __m256i *numbers = (const __m256i *)(x + m * width + g * GROUP);
                const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(front, _mm256_loadu_si256(numbers)),
                                                     _mm256_madd_epi16(back, _mm256_loadu_si256(numbers + 1)));
                const __m256 scale = _mm256_mul_ps(step, _mm256_broadcast_ss(units + m * groups + g));
                sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[m]);
            }
        }
        for (long g = 0; g < whole; g += LANES) {
            const __m256i both = _mm256_loadu_si256((const __m256i *)(scales + g));
            const __m256 step = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            const __m256 middle = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536)));
            const __m256 least = _mm256_fnmadd_ps(step, _mm256_set1_ps(8.0f), middle);
            EACH(int m = 0; m < count; m++)
                sums[m] = _mm256_fmadd_ps(least, _mm256_loadu_ps(totals + m * groups + g), sums[m]);
        }
        EACH(int m = 0; m < count; m++) {
            float sum = sum8(sums[m]);
            for (long g = whole; g < groups; g++)
                sum += (of_bits(scales[g] & 0xffff0000u) - 8 * of_bits(scales[g] << 16)) * totals[m * groups + g];
            p->y[(row + m) * p->size + n] = sum;
        }
    }
}
BY_COUNT(int4)

static const Kernel KERNELS[KINDS] = {float32_rows, bfloat16_rows, int8_rows, int4_rows};

/* All rows, a few at a time; the outputs in equal parts for the threads, each of which goes through its own in pieces
 * that stay in the caches from a few rows to the next few. */
static void run(const Product *p, Kernel kernel, int threads) {
    const long turns = (p->rows + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) {
        const long first = p->size * part / threads, end = p->size * (part + 1) / threads;
        for (long at = first; at < end; at += PIECE)
            for (long turn = 0; turn < turns; turn++) {
                const long row = p->rows * turn / turns, next = p->rows * (turn + 1) / turns;
                kernel(p, row, (int)(next - row), at, at + PIECE < end ? at + PIECE : end);
            }
    }
}

AVX2 static void round_group(const float *x, int16_t *numbers, float *scale, float *total) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 eights[4], largest = _mm256_setzero_ps(), sum = largest;
    EACH(int n = 0; n < 4; n++) {
        eights[n] = _mm256_loadu_ps(x + n * LANES);
        largest = _mm256_max_ps(largest, _mm256_and_ps(eights[n], no_sign));
        sum = _mm256_add_ps(sum, eights[n]);
    }
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    const float most = _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
    const __m256 unit = _mm256_set1_ps(most > 0 ? 32767.0f / most : 0.0f);
    int whole_sum = 0;
    EACH(int n = 0; n < 4; n += 2) {
        const __m256i first = _mm256_cvtps_epi32(_mm256_mul_ps(eights[n], unit));
        const __m256i second = _mm256_cvtps_epi32(_mm256_mul_ps(eights[n + 1], unit));
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
        _mm256_storeu_si256((__m256i *)(numbers + n * LANES), packed);
    }
    for (int n = 0; n < GROUP; n++) whole_sum += numbers[n];
    *scale = most / 32767.0f;
    *total = *scale * (float)whole_sum + 0.0f * sum8(sum);
}

/* Whether there is memory for it, which is `free`d by its numbers. */
static int round_all(Rounded *rounded, const float *x, long rows, long width) {
    const long groups = rows * (width / GROUP);
    rounded->numbers = malloc((size_t)groups * (GROUP * sizeof(int16_t) + 2 * sizeof(float)));
    if (!rounded->numbers) return 0;
    rounded->scales = (float *)(rounded->numbers + groups * GROUP);
    rounded->totals = rounded->scales + groups;
    for (long g = 0; g < groups; g++)
        round_group(x + g * GROUP, rounded->numbers + g * GROUP, rounded->scales + g, rounded->totals + g);
    return 1;
}

/* Whether there was memory for it. */
int multiply(const Matrix *w, const float *x, float *y, long rows, int threads) {
    Product p = {.x = x, .w = w->weight, .scales = w->scales, .y = y, .rows = rows, .size = w->size, .width = w->width};
    if (w->kind == INT4 && !round_all(&p.rounded, x, rows, w->width)) return 0;
    run(&p, KERNELS[w->kind], rows * w->size * w->width < SMALLEST ? 1 : threads);
    free(p.rounded.numbers);
    if (w->bias)
        for (long m = 0; m < rows; m++)
            for (long n = 0; n < w->size; n++) y[m * w->size + n] += w->bias[n];
    return 1;
}

PyObject *row_products(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    Matrix w = {.bias = NULL};
    w.kind = whole(&a);
    const float *x = address(&a);
    w.weight = address(&a), w.scales = address(&a);
    float *y = address(&a);
    const long rows = whole(&a);
    w.size = whole(&a), w.width = whole(&a);
    const int threads = (int)whole(&a);
    int done;
    (void)self;
    if (!complete(&a)) return NULL;
    if (w.kind < 0 || w.kind >= KINDS) return PyErr_Format(PyExc_ValueError, "no kind %ld", (long)w.kind);
    Py_BEGIN_ALLOW_THREADS
    done = multiply(&w, x, y, rows, threads);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

INLINE __m256 eight_nibbles(const uint8_t *bytes, int high) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
    const __m256i low = _mm256_and_si256(wide, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(high ? _mm256_srli_epi32(wide, 4) : low);
}

AVX2 static void unpack_int4(const uint8_t *w, const uint32_t *scales, float *y, long groups) {
    for (long g = 0; g < groups; g++) {
        const float step = of_bits(scales[g] << 16), middle = of_bits(scales[g] & 0xffff0000u);
        const __m256 steps = _mm256_set1_ps(step), middles = _mm256_set1_ps(middle), eight = _mm256_set1_ps(8.0f);
        EACH(int n = 0; n < 4; n++) {
            const __m256 numbers = eight_nibbles(w + g * (GROUP / 2) + n % 2 * LANES, n / 2);
            const __m256 scaled = _mm256_mul_ps(_mm256_sub_ps(numbers, eight), steps);
            _mm256_storeu_ps(y + g * GROUP + n * LANES, _mm256_add_ps(scaled, middles));
        }
    }
}

AVX2 static void unpack_int8(const int8_t *w, const uint16_t *scale, float *y, long width) {
    const float step = one_bfloat16(scale);
    for (long k = 0; k < width; k++) y[k] = (float)w[k] * step;
}

/* W as float32 [N, K]. */
PyObject *unpack(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    const long kind = whole(&a);
    const void *w = address(&a), *scales = address(&a);
    float *y = address(&a);
    const long size = whole(&a), width = whole(&a);
    const int threads = (int)whole(&a);
    (void)self;
    if (!complete(&a)) return NULL;
    if (kind != INT4 && kind != INT8) return PyErr_Format(PyExc_ValueError, "no packed kind %ld", kind);
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long n = 0; n < size; n++)
        if (kind == INT4)
            unpack_int4((const uint8_t *)w + n * (width / 2), (const uint32_t *)scales + n * (width / GROUP),
                        y + n * width, width / GROUP);
        else
            unpack_int8((const int8_t *)w + n * width, (const uint16_t *)scales + n, y + n * width, width);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
