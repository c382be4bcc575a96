/* What happens to each token on its own between products: norm, gate, rotation. A pass each, where torch's operations
 * take several, with all that calling them costs.
 *
 * Legend: B rows, L tokens, H heads, Dh width of a head.
 */
#include "native.h"

AVX2 void normalise(const float *x, const float *weight, float *y, long width, float eps) {
    const long lanes = width / LANES * LANES;
    __m256 sums = _mm256_setzero_ps(), others = sums;
    long k = 0;
    for (; k + 2 * LANES <= lanes; k += 2 * LANES) {
        const __m256 first = _mm256_loadu_ps(x + k), second = _mm256_loadu_ps(x + k + LANES);
        sums = _mm256_fmadd_ps(first, first, sums);
        others = _mm256_fmadd_ps(second, second, others);
    }
    for (; k < lanes; k += LANES) sums = _mm256_fmadd_ps(_mm256_loadu_ps(x + k), _mm256_loadu_ps(x + k), sums);
    float total = sum8(_mm256_add_ps(sums, others));
    for (; k < width; k++) total += x[k] * x[k];
    const float scale = 1.0f / sqrtf(total / (float)width + eps);
    const __m256 scales = _mm256_set1_ps(scale);
    for (k = 0; k < lanes; k += LANES) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + k), scales);
        _mm256_storeu_ps(y + k, weight ? _mm256_mul_ps(scaled, _mm256_loadu_ps(weight + k)) : scaled);
    }
    for (; k < width; k++) y[k] = x[k] * scale * (weight ? weight[k] : 1.0f);
}

/* Over the last of four axes; the others may lie anywhere. */
PyObject *rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    const float *x = address(&a), *weight = address(&a);
    float *y = address(&a);
    long sizes[3], x_steps[3], y_steps[3];
    for (int n = 0; n < 3; n++) sizes[n] = whole(&a);
    for (int n = 0; n < 3; n++) x_steps[n] = whole(&a);
    for (int n = 0; n < 3; n++) y_steps[n] = whole(&a);
    const long width = whole(&a);
    const float eps = real(&a);
    const int threads = (int)whole(&a);
    (void)self;
    if (!complete(&a)) return NULL;
    const long rows = sizes[0] * sizes[1] * sizes[2];
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const long i = row / (sizes[1] * sizes[2]), j = row / sizes[2] % sizes[1], k = row % sizes[2];
        normalise(x + i * x_steps[0] + j * x_steps[1] + k * x_steps[2], weight,
                  y + i * y_steps[0] + j * y_steps[1] + k * y_steps[2], width, eps);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* silu(gate) * up, gate first in a row of twice the width */
AVX2 void gate(const float *x, float *y, long width) {
    const float *up = x + width;
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    for (long k = 0; k < width; k += LANES) {
        const long left = width - k;
        float rest[2 * LANES] = {0};
        if (left < LANES) {
            memcpy(rest, x + k, (size_t)left * sizeof *rest);
            memcpy(rest + LANES, up + k, (size_t)left * sizeof *rest);
        }
        const __m256 g = _mm256_loadu_ps(left < LANES ? rest : x + k);
        const __m256 u = _mm256_loadu_ps(left < LANES ? rest + LANES : up + k);
        const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, exp8(_mm256_xor_ps(g, sign))));
        const __m256 product = _mm256_mul_ps(silu, u);
        if (left < LANES) {
            _mm256_storeu_ps(rest, product);
            memcpy(y + k, rest, (size_t)left * sizeof *rest);
        } else {
            _mm256_storeu_ps(y + k, product);
        }
    }
}

PyObject *silu_gate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    const float *x = address(&a);
    float *y = address(&a);
    const long rows = whole(&a), width = whole(&a);
    const int threads = (int)whole(&a);
    (void)self;
    if (!complete(&a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) gate(x + 2 * row * width, y + row * width, width);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* x / (1 + e^(-2 z)) with z = sqrt(2 / pi) (x + 0.044715 x^3), in place: the GELU approximated by tanh */
AVX2 static void gelu(float *x, long count) {
    const __m256 one = _mm256_set1_ps(1.0f), cubic = _mm256_set1_ps(0.044715f);
    const __m256 factor = _mm256_set1_ps(-1.5957691216057308f);
    for (long k = 0; k < count; k += LANES) {
        const long left = count - k;
        float rest[LANES] = {0}, *at = x + k;
        if (left < LANES) at = memcpy(rest, x + k, (size_t)left * sizeof *rest);
        const __m256 value = _mm256_loadu_ps(at);
        const __m256 grown = _mm256_fmadd_ps(_mm256_mul_ps(value, value), cubic, one);
        const __m256 power = exp8(_mm256_mul_ps(factor, _mm256_mul_ps(value, grown)));
        _mm256_storeu_ps(at, _mm256_div_ps(value, _mm256_add_ps(one, power)));
        if (left < LANES) memcpy(x + k, rest, (size_t)left * sizeof *rest);
    }
}

PyObject *gelu_tanh(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    float *x = address(&a);
    const long size = whole(&a);
    const int threads = (int)whole(&a);
    (void)self;
    if (!complete(&a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const long first = size * part / threads;
        gelu(x + first, size * (part + 1) / threads - first);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* A head whose first half is paired with its second; y may be x, here and below. */
AVX2 void turn_halves(const float *x, const float *cos, const float *sin, float *y, long half) {
    const long lanes = half / LANES * LANES;
    long k = 0;
    for (; k < lanes; k += LANES) {
        const __m256 a = _mm256_loadu_ps(x + k), b = _mm256_loadu_ps(x + half + k);
        const __m256 c = _mm256_loadu_ps(cos + k), s = _mm256_loadu_ps(sin + k);
        _mm256_storeu_ps(y + k, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        _mm256_storeu_ps(y + half + k, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
    }
    for (; k < half; k++) {
        const float a = x[k], b = x[half + k];
        y[k] = a * cos[k] - b * sin[k];
        y[half + k] = b * cos[k] + a * sin[k];
    }
}

/* A head whose neighbours are paired */
AVX2 static void turn_neighbours(const float *x, const float *cos, const float *sin, float *y, long half) {
    const long lanes = half / 4 * 4;
    long k = 0;
    for (; k < lanes; k += 4) { /* four pairs */
        const __m256 pairs = _mm256_loadu_ps(x + 2 * k);
        const __m128 c = _mm_loadu_ps(cos + k), s = _mm_loadu_ps(sin + k);
        const __m256 cc = _mm256_set_m128(_mm_unpackhi_ps(c, c), _mm_unpacklo_ps(c, c));
        const __m256 ss = _mm256_set_m128(_mm_unpackhi_ps(s, s), _mm_unpacklo_ps(s, s));
        const __m256 swapped = _mm256_permute_ps(pairs, 0xb1);
        _mm256_storeu_ps(y + 2 * k, _mm256_fmaddsub_ps(pairs, cc, _mm256_mul_ps(swapped, ss)));
    }
    for (; k < half; k++) {
        const float a = x[2 * k], b = x[2 * k + 1];
        y[2 * k] = a * cos[k] - b * sin[k];
        y[2 * k + 1] = b * cos[k] + a * sin[k];
    }
}

PyObject *rotate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    const float *x = address(&a), *cos = address(&a), *sin = address(&a);
    float *y = address(&a);
    const long rows = whole(&a), heads = whole(&a), length = whole(&a), width = whole(&a);
    const long row_step = whole(&a), head_step = whole(&a), token_step = whole(&a), table_step = whole(&a);
    const int by_halves = (int)whole(&a), threads = (int)whole(&a);
    (void)self;
    if (!complete(&a)) return NULL;
    const long half = width / 2;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long head = 0; head < rows * heads; head++) {
        const long row = head / heads;
        const float *from = x + row * row_step + head % heads * head_step;
        for (long n = 0; n < length; n++) {
            const long at = row * table_step + n * half;
            float *to = y + (head * length + n) * width;
            (by_halves ? turn_halves : turn_neighbours)(from + n * token_step, cos + at, sin + at, to, half);
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
