/* What the kernels share. They are for processors with AVX2 and FMA, and called with addresses: Python's side
 * (`kernels.py`) has checked shapes, dtypes and layout. Threads are those of torch's own OpenMP, which is looked up
 * among what is loaded: the module is not linked to another one. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline, unused)) AVX2
#define EACH(...) _Pragma("GCC unroll 8") for (__VA_ARGS__)

enum { LANES = 8 };
enum { SMALLEST = 1 << 15 }; /* operations; below, starting threads costs more than it saves */

INLINE float sum8(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Eight numbers, and one, as float32 */
INLINE __m256 eight_float32(const float *x) { return _mm256_loadu_ps(x); }
INLINE float one_float32(const float *x) { return *x; }
INLINE __m256 eight_bfloat16(const uint16_t *x) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE float one_bfloat16(const uint16_t *x) { return of_bits((uint32_t)*x << 16); }

/* e^x to about one unit in the last place, 0 and infinity beyond the range; not a number stays so. (Cephes' expf) */
INLINE __m256 exp8(__m256 x) {
    const __m256 most = _mm256_set1_ps(88.72283f), least = _mm256_set1_ps(-87.33654f);
    const __m256 kept = _mm256_max_ps(least, _mm256_min_ps(most, x)); /* no number stays: it is the second one */
    const __m256 scaled = _mm256_mul_ps(kept, _mm256_set1_ps(1.44269504f));
    const __m256 n = _mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), kept);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_fmadd_ps(_mm256_mul_ps(r, r), y, _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    /* 2^n in two steps, since n reaches 128 */
    const __m256i all = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(all, 1), rest = _mm256_sub_epi32(all, first);
    const __m256i bias = _mm256_set1_epi32(127);
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
    y = _mm256_blendv_ps(y, _mm256_set1_ps(INFINITY), _mm256_cmp_ps(x, most, _CMP_GT_OQ));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), y);
}

/* Python's arguments, read one after the other */
typedef struct {
    PyObject *const *values;
    Py_ssize_t count, taken;
} Arguments;

static inline __attribute__((unused)) long whole(Arguments *a) {
    if (a->taken >= a->count) return a->taken++, 0;
    return (long)PyLong_AsLongLong(a->values[a->taken++]);
}
static inline __attribute__((unused)) void *address(Arguments *a) { return (void *)(intptr_t)whole(a); }
static inline __attribute__((unused)) float real(Arguments *a) {
    if (a->taken >= a->count) return a->taken++, 0.0f;
    return (float)PyFloat_AsDouble(a->values[a->taken++]);
}

/* Whether all were numbers and none is missing or left; else an error is set. */
static inline __attribute__((unused)) int complete(const Arguments *a) {
    if (PyErr_Occurred()) return 0;
    if (a->taken == a->count) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", a->taken, a->count);
    return 0;
}

/* Attention of one query for each row and head. Key l of a row lies at `key_blocks[row][l / block_size]` (in numbers
 * from `keys`, [rows, num_blocks]) + l % block_size steps + its head's steps; so do values. Row b sees `lengths[b]`
 * keys, at most `most`; without lengths, that many. */
typedef struct {
    const float *queries;      /* [B, H, Dh] */
    const void *keys, *values;
    float *y;                  /* [B, H, Dh] */
    const int64_t *key_blocks, *value_blocks, *lengths;
    long rows, heads, kv_heads, most, width, num_blocks, block_size;
    long key_steps[2], value_steps[2]; /* from head to head, key to key, in numbers */
    float scale;
    int is_bfloat16;
} Attention;
int attend(const Attention *c, int threads);

/* y [M, N] = x [M, K] W^T + bias, W of one of the kinds */
typedef struct {
    int64_t kind;
    const void *weight, *scales;
    const float *bias;
    int64_t size, width;
} Matrix;
enum { FLOAT32, BFLOAT16, INT8, INT4, KINDS };
int multiply(const Matrix *w, const float *x, float *y, long rows, int threads);

void normalise(const float *x, const float *weight, float *y, long width, float eps);
void gate(const float *x, float *y, long width);
void turn_halves(const float *x, const float *cos, const float *sin, float *y, long half);

PyObject *row_products(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *unpack(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *silu_gate(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *gelu_tanh(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *rotate(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *one_query(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *one_token(PyObject *self, PyObject *const *args, Py_ssize_t count);
