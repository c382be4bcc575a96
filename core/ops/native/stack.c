/* A stack of decoder blocks on one new token of each row, in one call: what `blocks/decoder.py` does step by step. In
 * between, calling costs more than computing: a block's dozen small operations take no longer than Python's way to one.
 *
 * Legend: M rows, D width, H heads, Hkv key/value heads, Dh width of a head, N blocks, T places of a row.
 */
#include "native.h"

/* In 64-bit numbers, as `one_token.py` writes them; a norm that is not there is NULL. */
typedef struct {
    Matrix qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
} Block;
_Static_assert(sizeof(Block) == 28 * sizeof(int64_t), "pointers are 64-bit numbers");

typedef struct {
    float norm_eps, head_eps, scale;
} Reals;

typedef struct {
    long rows, width, heads, kv_heads, head_width, hidden, table_step;
    const float *cos, *sin;    /* [M or 1, Dh / 2] */
    const int64_t *places;     /* [M, T], where each row's tokens lie, `size` of them at a time, in numbers */
    const int64_t *lengths;    /* [M] tokens that a row holds, the new one too */
    long most, num_places, size, head_step, token_step;
    int is_bfloat16, threads;
} Call;

typedef struct {
    float *normed, *qkv, *attended, *added, *gates, *gated;
} Scratch;

static long qkv_heads(const Call *c) { return c->heads + 2 * c->kv_heads; }

static int allocate(Scratch *s, const Call *c) {
    const long inner = c->heads * c->head_width, all = qkv_heads(c) * c->head_width;
    float *at = malloc((size_t)c->rows * (size_t)(2 * c->width + all + inner + 3 * c->hidden) * sizeof *at);
    if (!at) return 0;
    s->normed = at, at += c->rows * c->width;
    s->added = at, at += c->rows * c->width;
    s->qkv = at, at += c->rows * all;
    s->attended = at, at += c->rows * inner;
    s->gates = at, at += c->rows * 2 * c->hidden;
    s->gated = at;
    return 1;
}

static void norm_rows(const float *x, const float *weight, float *y, long rows, long width, float eps) {
    for (long m = 0; m < rows; m++) normalise(x + m * width, weight, y + m * width, width, eps);
}

/* To the nearest bfloat16, halves to even */
static uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void write_head(const Call *c, void *buffer, long at, const float *head) {
    if (!c->is_bfloat16) {
        memcpy((float *)buffer + at, head, (size_t)c->head_width * sizeof *head);
        return;
    }
    for (long k = 0; k < c->head_width; k++) ((uint16_t *)buffer)[at + k] = to_bfloat16(head[k]);
}

/* Queries and keys through their norms and the rotation; keys and values to their places; queries side by side. */
static void place_heads(const Call *c, const Block *b, const Reals *r, float *qkv, void *keys, void *values) {
    const long width = c->head_width, row_width = qkv_heads(c) * width;
    for (long m = 0; m < c->rows; m++) {
        const float *cos = c->cos + m * c->table_step, *sin = c->sin + m * c->table_step;
        const long before = c->lengths[m] - 1;
        const long at = c->places[m * c->num_places + before / c->size] + before % c->size * c->token_step;
        for (long h = 0; h < c->heads + c->kv_heads; h++) {
            float *head = qkv + m * row_width + h * width;
            const float *norm = h < c->heads ? b->query_norm : b->key_norm;
            if (norm) normalise(head, norm, head, width, r->head_eps);
            turn_halves(head, cos, sin, head, width / 2);
            if (h >= c->heads) write_head(c, keys, at + (h - c->heads) * c->head_step, head);
        }
        for (long h = 0; h < c->kv_heads; h++)
            write_head(c, values, at + h * c->head_step, qkv + m * row_width + (c->heads + c->kv_heads + h) * width);
        memmove(qkv + m * c->heads * width, qkv + m * row_width, (size_t)(c->heads * width) * sizeof *qkv);
    }
}

static void add(float *x, const float *y, long count) {
    for (long n = 0; n < count; n++) x[n] += y[n];
}

/* One block's changes to x [M, D]; whether there was memory. */
static int run_block(const Call *c, const Block *b, const Reals *r, float *x, void *keys, void *values, Scratch *s) {
    const long rows = c->rows, width = c->width;
    const Attention attention = {
        .queries = s->qkv, .keys = keys, .values = values, .y = s->attended,
        .key_blocks = c->places, .value_blocks = c->places, .lengths = c->lengths,
        .rows = rows, .heads = c->heads, .kv_heads = c->kv_heads, .most = c->most, .width = c->head_width,
        .num_blocks = c->num_places, .block_size = c->size,
        .key_steps = {c->head_step, c->token_step}, .value_steps = {c->head_step, c->token_step},
        .scale = r->scale, .is_bfloat16 = c->is_bfloat16,
    };
    const int is_long = rows * c->heads * c->most * c->head_width >= SMALLEST;
    norm_rows(x, b->attention_norm, s->normed, rows, width, r->norm_eps);
    if (!multiply(&b->qkv, s->normed, s->qkv, rows, c->threads)) return 0;
    place_heads(c, b, r, s->qkv, keys, values);
    if (!attend(&attention, is_long ? c->threads : 1)) return 0;
    if (!multiply(&b->output, s->attended, s->added, rows, c->threads)) return 0;
    add(x, s->added, rows * width);
    norm_rows(x, b->mlp_norm, s->normed, rows, width, r->norm_eps);
    if (!multiply(&b->gate_up, s->normed, s->gates, rows, c->threads)) return 0;
    for (long m = 0; m < rows; m++) gate(s->gates + m * 2 * c->hidden, s->gated + m * c->hidden, c->hidden);
    if (!multiply(&b->down, s->gated, s->added, rows, c->threads)) return 0;
    add(x, s->added, rows * width);
    return 1;
}

static int run_blocks(const Call *c, const Block *blocks, const Reals *reals, long count, float *x, void *const *keys,
                      void *const *values) {
    Scratch scratch;
    if (!allocate(&scratch, c)) return 0;
    int done = 1;
    for (long n = 0; n < count && done; n++)
        done = run_block(c, blocks + n, reals + n, x, keys[n], values[n], &scratch);
    free(scratch.normed);
    return done;
}

PyObject *one_token(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {args, count, 0};
    const Block *blocks = address(&a);
    const Reals *reals = address(&a);
    const long num_blocks = whole(&a);
    float *x = address(&a);
    Call c;
    c.cos = address(&a), c.sin = address(&a), c.table_step = whole(&a);
    void *const *keys = address(&a);
    void *const *values = address(&a);
    c.places = address(&a), c.lengths = address(&a);
    c.rows = whole(&a), c.width = whole(&a), c.heads = whole(&a), c.kv_heads = whole(&a), c.head_width = whole(&a);
    c.hidden = whole(&a), c.most = whole(&a), c.num_places = whole(&a), c.size = whole(&a);
    c.head_step = whole(&a), c.token_step = whole(&a);
    c.is_bfloat16 = (int)whole(&a), c.threads = (int)whole(&a);
    int done;
    (void)self;
    if (!complete(&a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = run_blocks(&c, blocks, reals, num_blocks, x, keys, values);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
