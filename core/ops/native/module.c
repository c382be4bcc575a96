/* The module `_native`: our kernels in C. Each docstring gives the arguments; pointers are addresses, 0 where there is
 * none, sizes and steps are counted in numbers. */
#include "native.h"

#define KERNEL(name, arguments) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, #name "(" arguments ")"}

static PyMethodDef METHODS[] = {
    KERNEL(row_products, "kind, x, w, scales, y, rows, size, width, threads"),
    KERNEL(unpack, "kind, w, scales, y, size, width, threads"),
    KERNEL(rms_norm, "x, weight, y, three sizes, three steps of x, three steps of y, width, eps, threads"),
    KERNEL(silu_gate, "x, y, rows, width, threads"),
    KERNEL(gelu_tanh, "x, size, threads"),
    KERNEL(rotate, "x, cos, sin, y, rows, heads, length, width, row_step, head_step, token_step, table_step, "
                   "by_halves, threads"),
    KERNEL(one_query, "queries, keys, values, y, key_rows, value_rows, lengths, rows, heads, kv_heads, num_keys, "
                      "width, key_head_step, key_step, value_head_step, value_step, scale, is_bfloat16, threads"),
    KERNEL(one_token, "blocks, reals, num_blocks, x, cos, sin, table_step, keys, values, places, lengths, rows, width, "
                      "heads, kv_heads, head_width, hidden, most, num_places, place_size, head_step, token_step, "
                      "is_bfloat16, threads"),
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module) {
    (void)module;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 0;
    PyErr_SetString(PyExc_ImportError, "this processor has no AVX2");
    return -1;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)start}, {0, NULL}};
static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, METHODS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
