/* Attention of one query for each row and head, as in decoding: softmax(scale q k^T) v over keys that lie in blocks
 * anywhere.
 *
 * Legend: B rows, H query heads, Hkv key/value heads, Lk keys, Dh width of a head.
 */
#include "native.h"

enum { TAKEN = 8 }; /* vectors of eight that are added up at a time */

#define ATTENTION(kind, type)                                                                                          \
    AVX2 static void scores_##kind(const float *query, const type *keys, long step, long count, long width,            \
                                   float scale, float *scores) {                                                       \
        for (long l = 0; l < count; l++) {                                                                             \
            const type *key = keys + l * step;                                                                         \
            __m256 sums = _mm256_setzero_ps(), others = sums;                                                          \
            long k = 0;                                                                                                \
            for (; k + 2 * LANES <= width; k += 2 * LANES) {                                                           \
                sums = _mm256_fmadd_ps(eight_##kind(key + k), _mm256_loadu_ps(query + k), sums);                       \
                others = _mm256_fmadd_ps(eight_##kind(key + k + LANES), _mm256_loadu_ps(query + k + LANES), others);   \
            }                                                                                                          \
            if (k < width) sums = _mm256_fmadd_ps(eight_##kind(key + k), _mm256_loadu_ps(query + k), sums);            \
            scores[l] = scale * sum8(_mm256_add_ps(sums, others));                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    AVX2 static void add_mean_##kind(const float *shares, const type *values, long step, long count, long width,       \
                                     float *y) {                                                                       \
        for (long from = 0; from < width; from += TAKEN * LANES) {                                                     \
            const long taken = (width - from < TAKEN * LANES ? width - from : TAKEN * LANES) / LANES;                  \
            __m256 sums[TAKEN];                                                                                        \
            for (long n = 0; n < taken; n++) sums[n] = _mm256_loadu_ps(y + from + n * LANES);                          \
            for (long l = 0; l < count; l++) {                                                                         \
                const __m256 share = _mm256_set1_ps(shares[l]);                                                        \
                const type *value = values + l * step + from;                                                          \
                if (taken == TAKEN) {                                                                                  \
                    EACH(int n = 0; n < TAKEN; n++)                                                                    \
                        sums[n] = _mm256_fmadd_ps(share, eight_##kind(value + n * LANES), sums[n]);                    \
                } else {                                                                                               \
                    for (long n = 0; n < taken; n++)                                                                   \
                        sums[n] = _mm256_fmadd_ps(share, eight_##kind(value + n * LANES), sums[n]);                    \
                }                                                                                                      \
            }                                                                                                          \
            for (long n = 0; n < taken; n++) _mm256_storeu_ps(y + from + n * LANES, sums[n]);                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void attend_##kind(const Attention *c, long row, long head, float *scores) {                                \
        const long at = (row * c->heads + head) * c->width, kv_head = head / (c->heads / c->kv_heads);                 \
        const long seen = seen_by(c, row), size = c->block_size;                                                       \
        const type *keys = (const type *)c->keys + kv_head * c->key_steps[0];                                          \
        const type *values = (const type *)c->values + kv_head * c->value_steps[0];                                    \
        const int64_t *key_blocks = c->key_blocks + row * c->num_blocks;                                               \
        const int64_t *value_blocks = c->value_blocks + row * c->num_blocks;                                           \
        for (long l = 0; l < seen; l += size)                                                                          \
            scores_##kind(c->queries + at, keys + key_blocks[l / size], c->key_steps[1],                               \
                          seen - l < size ? seen - l : size, c->width, c->scale, scores + l);                          \
        shares(scores, seen);                                                                                          \
        memset(c->y + at, 0, (size_t)c->width * sizeof *c->y);                                                         \
        for (long l = 0; l < seen; l += size)                                                                          \
            add_mean_##kind(scores + l, values + value_blocks[l / size], c->value_steps[1],                            \
                            seen - l < size ? seen - l : size, c->width, c->y + at);                                   \
    }

static long seen_by(const Attention *c, long row) {
    return c->lengths && c->lengths[row] < c->most ? (long)c->lengths[row] : c->most;
}

/* softmax, in place */
AVX2 static void shares(float *scores, long count) {
    float most = -INFINITY, rest[LANES];
    for (long l = 0; l < count; l++) most = scores[l] > most ? scores[l] : most;
    const __m256 largest = _mm256_set1_ps(most);
    const long lanes = count / LANES * LANES;
    __m256 sums = _mm256_setzero_ps();
    for (long l = 0; l < lanes; l += LANES) {
        const __m256 value = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + l), largest));
        sums = _mm256_add_ps(sums, value);
        _mm256_storeu_ps(scores + l, value);
    }
    if (lanes < count) {
        for (long n = 0; n < LANES; n++) rest[n] = lanes + n < count ? scores[lanes + n] : -INFINITY;
        const __m256 value = exp8(_mm256_sub_ps(_mm256_loadu_ps(rest), largest));
        sums = _mm256_add_ps(sums, value);
        _mm256_storeu_ps(rest, value);
        memcpy(scores + lanes, rest, (size_t)(count - lanes) * sizeof *rest);
    }
    const float factor = 1.0f / sum8(sums);
    for (long l = 0; l < count; l++) scores[l] *= factor;
}

ATTENTION(float32, float)
ATTENTION(bfloat16, uint16_t)

/* Whether there is memory for the scores. */
int attend(const Attention *c, int threads) {
    float *scores = malloc((size_t)threads * (size_t)(c->most + 1) * sizeof *scores);
    if (!scores) return 0;
    const long all = c->rows * c->heads;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        float *own = scores + part * (c->most + 1);
        for (long n = all * part / threads; n < all * (part + 1) / threads; n++)
            (c->is_bfloat16 ? attend_bfloat16 : attend_float32)(c, n / c->heads, n % c->heads, own);
    }
    free(scores);
    return 1;
}

PyObject *one_query(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    Attention c;
    c.queries = address(&a), c.keys = address(&a), c.values = address(&a), c.y = address(&a);
    c.key_blocks = address(&a), c.value_blocks = address(&a), c.lengths = address(&a);
    c.rows = whole(&a), c.heads = whole(&a), c.kv_heads = whole(&a), c.most = whole(&a), c.width = whole(&a);
    c.num_blocks = 1, c.block_size = c.most ? c.most : 1;
    for (int n = 0; n < 2; n++) c.key_steps[n] = whole(&a);
    for (int n = 0; n < 2; n++) c.value_steps[n] = whole(&a);
    c.scale = real(&a);
    c.is_bfloat16 = (int)whole(&a);
    const int threads = (int)whole(&a);
    int done;
    (void)self;
    if (!complete(&a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = attend(&c, threads);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
