# Our kernels in C: arguments are addresses (0: none), sizes and steps in numbers. See `kernels.py`.

def row_products(
    kind: int, x: int, w: int, scales: int, y: int, rows: int, size: int, width: int, threads: int, /
) -> None: ...
def unpack(kind: int, w: int, scales: int, y: int, size: int, width: int, threads: int, /) -> None: ...
def rms_norm(x: int, weight: int, y: int, rows: int, width: int, eps: float, threads: int, /) -> None: ...
def silu_gate(x: int, y: int, rows: int, width: int, threads: int, /) -> None: ...
def rotate(
    x: int,
    cos: int,
    sin: int,
    y: int,
    rows: int,
    heads: int,
    length: int,
    width: int,
    row_step: int,
    head_step: int,
    token_step: int,
    table_step: int,
    by_halves: bool,
    threads: int,
    /,
) -> None: ...
def one_query(
    queries: int,
    keys: int,
    values: int,
    y: int,
    key_rows: int,
    value_rows: int,
    lengths: int,
    rows: int,
    heads: int,
    kv_heads: int,
    num_keys: int,
    width: int,
    key_head_step: int,
    key_step: int,
    value_head_step: int,
    value_step: int,
    scale: float,
    is_bfloat16: bool,
    threads: int,
    /,
) -> None: ...
def one_token(
    blocks: int,
    reals: int,
    num_blocks: int,
    x: int,
    cos: int,
    sin: int,
    table_step: int,
    keys: int,
    values: int,
    places: int,
    lengths: int,
    rows: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    hidden: int,
    most: int,
    num_places: int,
    place_size: int,
    head_step: int,
    token_step: int,
    is_bfloat16: bool,
    threads: int,
    /,
) -> None: ...
