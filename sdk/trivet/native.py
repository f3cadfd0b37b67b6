"""The C library through cffi: where it is found, what it declares, and thin helpers over its kernels.

Declarations are kept in step with the headers by tests/sdk/test_native.py, which compiles them against each other.
Nothing is loaded before the first call of `library`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.error import Error

if TYPE_CHECKING:
    import numpy as np

MAX_RANK = 8
NONE = 0xFFFFFFFF
HAL_ABI = 1

OK, PENDING, ARGUMENT, FORMAT, VERSION, MEMORY, UNSUPPORTED, DEVICE, STATE = 0, 1, -1, -2, -3, -4, -5, -6, -7
OPEN_DEFER_CRC, OPEN_NO_CRC = 1, 2
SESSION_REPLAN, SESSION_KEEP_STATE, SESSION_IN_ORDER = 1, 2, 4
CAP_HOST_MEMORY, CAP_ASYNC, CAP_IMPORT, CAP_THREADS = 1, 2, 4, 8

BASE = """
typedef int32_t trv_status;
typedef struct trv_diag {
  trv_status status; uint32_t step; uint32_t time; uint32_t value; uint32_t axis; const char *what; int64_t expected;
  int64_t limit; int64_t got;
} trv_diag;
typedef struct trv_span { const uint8_t *data; size_t size; } trv_span;
typedef struct trv_buf { uint8_t *host; uint64_t dev; size_t size; } trv_buf;
typedef ptrdiff_t trv_dim;
"""

HAL = """
typedef struct trv_device trv_device;
typedef struct trv_part trv_part;
typedef struct trv_view {
  uint32_t size; uint32_t region_count, value_count, storage_count, dim_count;
  const trv_buf *regions; const trvf_value *values; const trvf_storage *storages; const uint8_t *offsets;
  size_t offset_stride; trv_dim *dims; const trvf_dim *dim_table; const trvf_region *region_table; uint32_t input_count;
  uint32_t memories;
} trv_view;
typedef struct trv_tensor {
  uint8_t *data; uint8_t dtype, rank; uint16_t flags; trv_dim dim[8], stride[8];
} trv_tensor;
typedef struct trv_part_desc {
  uint32_t size; const char *format; trv_span data; const uint32_t *inputs; const uint32_t *outputs;
  uint32_t input_count, output_count; const trv_view *view;
} trv_part_desc;
typedef struct trv_caps { uint32_t size; uint32_t flags; size_t alignment; uint64_t memory_free; const char *arch; } trv_caps;
typedef struct trv_runner {
  void (*run)(void *self, void (*fn)(void *ctx, uint32_t i), void *ctx, uint32_t count); void *self; uint32_t workers;
} trv_runner;
typedef struct trv_work { uint32_t size, time; uint32_t tiles; uint32_t isa; const char *kernel; } trv_work;
typedef struct trv_turn {
  uint32_t size, state; uint32_t step, time; uint32_t index; const struct trv_driver *driver; trv_device *device; uint64_t point;
} trv_turn;
typedef struct trv_hooks {
  uint32_t size; void (*begin)(void *self, uint32_t time); void (*end)(void *self, uint32_t time); void *self;
  void (*work)(void *self, const trv_work *work); void (*turn)(void *self, const trv_turn *turn);
} trv_hooks;
typedef struct trv_run {
  uint32_t size; uint32_t epoch; const trv_view *view; const trv_runner *runner; const trv_hooks *hooks; trv_diag *diag;
  uint32_t shape_epoch;
} trv_run;
typedef struct trv_config { uint32_t size; const char *options; } trv_config;
typedef struct trv_driver {
  uint32_t size, abi; const char *name; size_t device_bytes;
  trv_status (*open)(void *mem, const void *config, trv_device **out_dev);
  void (*close)(trv_device *);
  void (*caps)(trv_device *, trv_caps *out_caps);
  trv_status (*mem_alloc)(trv_device *, size_t size, size_t align, trv_buf *out_buf);
  trv_status (*mem_import)(trv_device *, void *host, size_t size, trv_buf *out_buf);
  void (*mem_free)(trv_device *, trv_buf *);
  trv_status (*part_need)(trv_device *, const trv_part_desc *, size_t *out_bytes, trv_diag *diag);
  trv_status (*part_open)(trv_device *, const trv_part_desc *, void *mem, trv_part **out_part);
  void (*part_close)(trv_device *, trv_part *);
  trv_status (*run)(trv_device *, trv_part *, const trv_run *, uint64_t *out_point);
  trv_status (*copy)(trv_device *, const trv_buf *dst, const trv_buf *src, size_t size, uint64_t *out_point);
  trv_status (*wait)(trv_device *, uint64_t point, uint64_t timeout_ns);
  trv_status (*join)(trv_device *, trv_device *other, uint64_t point);
  trv_status (*stamp)(trv_device *, uint64_t point, uint64_t *out_ns);
  int32_t (*last_error)(trv_device *, const char **out_what);
} trv_driver;
typedef struct trv_cpu_config { uint32_t size; const char *isa; } trv_cpu_config;
extern trv_driver trv_cpu_driver;
"""

RUNTIME = """
typedef struct trv_reader {
  trv_status (*read)(void *self, uint64_t offset, void *dst, size_t size); void *self; uint64_t size;
} trv_reader;
typedef struct trv_program {
  trv_span file; trv_span external; uint32_t root, entry_count, segment_count, flags; const trvf_segment *segments;
  const trv_reader *reader; trv_diag diag;
} trv_program;
typedef struct trv_entry {
  const char *name;
  uint32_t index, input_count, output_count, region_count, step_count, value_count, storage_count, dim_count, part_count;
  uint32_t table; uint32_t times; uint64_t lower_bound; const char *signature;
} trv_entry;
typedef struct trv_region { uint8_t kind, memory; uint16_t id; uint32_t align; uint64_t size; uint32_t flags; } trv_region;
typedef struct trv_slot {
  const char *name; uint32_t value; uint8_t dtype, rank; int64_t dim[8], min[8], max[8];
} trv_slot;
trv_status trv_program_open(trv_program *out_prog, trv_span file, uint32_t flags);
trv_status trv_program_attach(trv_program *prog, trv_span weights, uint32_t flags);
trv_status trv_program_check(trv_program *prog);
trv_status trv_program_entry(const trv_program *prog, uint32_t index, trv_entry *out_entry);
trv_status trv_program_find(const trv_program *prog, const char *name, trv_entry *out_entry);
trv_status trv_program_region(const trv_program *prog, uint32_t entry, uint32_t i, trv_region *out_region);
trv_status trv_program_input(const trv_program *prog, uint32_t entry, uint32_t i, trv_slot *out_slot);
trv_status trv_program_output(const trv_program *prog, uint32_t entry, uint32_t i, trv_slot *out_slot);
const char *trv_program_debug(const trv_program *prog, uint32_t entry, uint32_t time, uint32_t field);
typedef struct trv_session trv_session;
typedef struct trv_bound_device { const trv_driver *driver; trv_device *device; } trv_bound_device;
typedef struct trv_session_desc {
  uint32_t size; uint32_t entry; const trv_program *program; const trv_bound_device *devices; uint32_t device_count;
  uint32_t flags; const trv_buf *regions; const trv_runner *runner; const trv_hooks *hooks; uint32_t max_steps;
  const uint8_t *keep;
} trv_session_desc;
trv_status trv_session_bytes(const trv_session_desc *desc, size_t *out_bytes, trv_diag *out_diag);
trv_status trv_session_init(const trv_session_desc *desc, void *mem, size_t size, trv_session **out_sess,
                            trv_diag *out_diag);
void trv_session_deinit(trv_session *sess);
trv_status trv_session_homes(const trv_session_desc *desc, uint32_t *out_devices, trv_diag *out_diag);
typedef struct trv_step {
  uint32_t size; uint32_t kind, time; uint32_t device; uint32_t alternative, alternatives; const char *wanted;
  trv_status status; const char *why;
} trv_step;
trv_status trv_session_step(const trv_session *sess, uint32_t i, trv_step *out_step);
trv_status trv_session_read(trv_session *sess, uint32_t region, void *dst, size_t size);
trv_status trv_session_write(trv_session *sess, uint32_t region, const void *src, size_t size);
trv_status trv_session_reset(trv_session *sess);
const trv_tensor *trv_session_input(trv_session *sess, uint32_t i);
const trv_tensor *trv_session_output(trv_session *sess, uint32_t i);
trv_status trv_session_bind_input(trv_session *sess, uint32_t i, uint32_t dtype, uint32_t rank, const int64_t *dims,
                                  trv_buf buf);
trv_status trv_session_bind_output(trv_session *sess, uint32_t i, trv_buf buf);
trv_status trv_session_bind_region(trv_session *sess, uint32_t i, trv_buf buf);
trv_status trv_session_plan(trv_session *sess);
trv_status trv_session_run(trv_session *sess);
uint32_t trv_selftest_cases(const trv_program *prog);
trv_status trv_selftest(trv_session *const *sessions, const trv_program *prog, uint32_t index, trv_diag *out_diag);
typedef struct trv_event {
  const trv_driver *driver; trv_device *device; uint64_t point; trv_session *session;
} trv_event;
trv_status trv_session_submit(trv_session *sess, trv_event *out_done);
trv_status trv_event_wait(const trv_event *event, uint64_t timeout_ns);
const trv_diag *trv_session_diag(const trv_session *sess);
const trv_view *trv_session_view(const trv_session *sess);
void trv_session_hooks(trv_session *sess, const trv_hooks *hooks);
const char *trv_status_text(trv_status status);
size_t trv_diag_print(const trv_diag *diag, char *out, size_t size);
typedef struct trv_host trv_host;
trv_status trv_host_open(const char *path, const char *weights, uint32_t flags, uint32_t threads, trv_host **out_host,
                         trv_diag *out_diag);
trv_status trv_host_open_span(trv_span file, trv_span weights, uint32_t flags, uint32_t threads, trv_host **out_host,
                              trv_diag *out_diag);
typedef struct trv_host_desc {
  uint32_t size, flags, threads; const char *path, *weights_path; trv_span file, weights; const char *devices;
  const char *const *plugins; uint32_t plugin_count; uint32_t bound_count; const trv_bound_device *bound;
} trv_host_desc;
trv_status trv_host_open_with(const trv_host_desc *desc, trv_host **out_host, trv_diag *out_diag);
trv_status trv_host_device(const trv_host *host, uint32_t i, trv_bound_device *out_device);
void trv_host_close(trv_host *host);
const trv_program *trv_host_program(const trv_host *host);
typedef struct trv_context trv_context;
trv_status trv_context_open(trv_host *host, uint32_t flags, trv_context **out_ctx, trv_diag *out_diag);
typedef struct trv_threads {
  uint32_t size; uint32_t count; const uint32_t *cpus; uint32_t cpu_count; const trv_runner *runner;
} trv_threads;
trv_status trv_context_open_on(trv_host *host, uint32_t flags, const trv_threads *threads, trv_context **out_ctx,
                               trv_diag *out_diag);
void trv_context_close(trv_context *ctx);
trv_session *trv_context_session(trv_context *ctx, uint32_t entry);
trv_status trv_context_plan(trv_context *ctx, uint32_t entry);
trv_status trv_context_run(trv_context *ctx, uint32_t entry);
trv_status trv_context_submit(trv_context *ctx, uint32_t entry, trv_event *out_done);
trv_status trv_context_call(trv_context *ctx, uint32_t entry, const trv_buf *inputs, uint32_t input_count,
                            const trv_buf *outputs, uint32_t output_count);
trv_status trv_context_reset(trv_context *ctx);
size_t trv_context_bytes(const trv_context *ctx);
typedef struct trv_record {
  uint64_t begin_ns, end_ns; const char *kernel; uint32_t time, tiles, isa; uint32_t track; uint64_t point;
} trv_record;
typedef struct trv_recorder {
  trv_hooks hooks; trv_record *records; uint32_t capacity, count; uint32_t track, mark; uint64_t began_ns;
} trv_recorder;
void trv_recorder_init(trv_recorder *out_rec, trv_record *records, uint32_t capacity);
"""

KERNELS = """
size_t trvk_pack_bytes(uint32_t op, const void *attrs, uint32_t dtype, uint32_t rank, const int64_t *shape);
void trvk_pack(uint32_t op, const void *attrs, uint32_t dtype, uint32_t rank, const int64_t *shape,
               const int64_t *strides, const void *src, void *dst);
size_t trvk_rnn_tmp_bytes(const void *attrs, uint32_t dtype, int64_t n, int64_t in, int64_t hidden, int64_t proj);
size_t trvk_conv_tmp_bytes(const void *attrs, int64_t cin, int64_t tiles);
const char *trvk_isa_name(uint32_t op, uint32_t index);
uint32_t trvk_isa_mask(const char *name);
const char *trvk_select_name(uint32_t op, const trv_tensor *args, uint32_t n_in, uint32_t n_out, const void *attrs,
                             const trvf_map_instr *code, uint32_t code_count, uint32_t isa_mask);
double trvk_peak(uint32_t what, void *buf, size_t size, uint64_t rounds);
size_t trvk_qrnn_tmp_bytes(const void *attrs, int64_t n, int64_t in, int64_t hidden);
size_t trvk_mcu_conv_tmp_bytes(const void *attrs, int64_t channels);
size_t trvk_mcu_matmul_tmp_bytes(int64_t rows, int64_t k);
trv_status trvk_run(uint32_t op, const char *isa, const trv_tensor *args, uint32_t n_in, uint32_t n_out, uint32_t n_tmp,
                    const void *attrs, const trvf_map_instr *code, uint32_t code_count, trv_dim *dims,
                    const trvf_dim *dim_table, uint32_t dim_count, uint32_t tiles, trv_diag *diag);
"""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library. ffi: cffi's FFI; lib: the functions."""

    ffi: Any
    lib: Any
    path: Path


_lock = threading.Lock()
_loaded: Library | None = None


def snake(name: str) -> str:
    """MapInstr -> map_instr, as schema/generate.py spells the C names."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def schema_cdef() -> str:
    """C text of the file's structs, from the same table that the writer uses."""
    from trivet.fbs.structs import STRUCTS

    c = {"u1": "uint8_t", "i1": "int8_t", "u2": "uint16_t", "i2": "int16_t", "u4": "uint32_t", "i4": "int32_t",
         "u8": "uint64_t", "i8": "int64_t", "f4": "float", "f8": "double"}  # fmt: skip
    lines = []
    for name, dtype in STRUCTS.items():
        fields = []
        for field, info in (dtype.fields or {}).items():
            base, shape = info[0].subdtype or (info[0], ())
            fields.append(f"{c[base.str[1:]]} {field}{''.join(f'[{n}]' for n in shape)};")
        lines.append(f"typedef struct trvf_{snake(name)} {{ {' '.join(fields)} }} trvf_{snake(name)};")
    return "\n".join(lines)


def cdef() -> str:
    """All declarations, in order."""
    return BASE + schema_cdef() + HAL + RUNTIME + KERNELS


def candidates() -> list[Path]:
    """Where the library is looked for, best first."""
    name = {"win32": "trivet.dll", "darwin": "libtrivet.dylib"}.get(sys.platform, "libtrivet.so")
    if env := os.environ.get("TRIVET_LIBRARY"):
        return [Path(env)]
    import trivet

    here = Path(__file__).resolve().parent
    folders = [here, *(Path(p) for p in trivet.__path__)]  # an editable install has the library in a folder of its own
    found = [f / sub / name for f in dict.fromkeys(folders) for sub in ("lib", "lib64", "bin", "")]
    if (here.parent.parent / "CMakeLists.txt").is_file():  # a source tree: the build folder of the README
        found.append(here.parent.parent / "build" / name)
    return found


def plugin_path(name: str | os.PathLike[str]) -> str:
    """The shared library of a plug-in: a path as it is; a bare name means one that lies beside trivet's own library."""
    text = os.fspath(name)
    if os.sep in text or "." in text:
        return text
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return str(library().path.resolve().parent / f"libtrivet_{text}.{suffix}")


def library() -> Library:
    """Loads the library once. Any thread may call it.

    Raises:
        Error: no library, or one that does not fit this package.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def write_bindings(path: str) -> None:
    """Writes the declarations in the form that cffi reads at once: parsing C takes it 0.1 s, and again 3 ms per type that is named."""
    import cffi

    text = cdef()
    ffi = cffi.FFI()
    ffi.cdef(text)
    ffi.set_source("trivet.fbs.bindings", None)
    ffi.emit_python_code(path)
    with Path(path).open("a") as f:
        f.write(f"CRC = {zlib.crc32(text.encode())}\n")


def _declared() -> Any:
    """cffi's FFI: of the generated file, unless that is older than the declarations here."""
    text = cdef()
    try:
        from trivet.fbs import bindings

        if zlib.crc32(text.encode()) == bindings.CRC:
            return bindings.ffi
    except ImportError:
        pass
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(text)
    return ffi


def _load() -> Library:
    tried = candidates()
    path = next((p for p in tried if p.is_file()), None)
    if path is None:
        raise Error(
            f"the C library is not there: looked for {', '.join(str(p) for p in tried)}",
            remedy="install the wheel (pip install .), or build it (cmake -S . -B build && cmake --build build) and set "
            "TRIVET_LIBRARY to the shared library",
        )
    ffi = _declared()
    try:
        lib = ffi.dlopen(str(path))
    except OSError as e:
        raise Error(f"cannot load the C library {path}: {e}", remedy="build it for this machine") from None
    try:
        abi, size = int(lib.trv_cpu_driver.abi), int(lib.trv_cpu_driver.size)
    except AttributeError:
        raise Error(f"{path} is not a trivet library: it has no CPU driver") from None
    if abi != HAL_ABI or size != ffi.sizeof("trv_driver"):
        raise Error(
            f"{path} does not fit this package: HAL abi {HAL_ABI} (driver of {ffi.sizeof('trv_driver')} bytes) expected, "
            f"got abi {abi} ({size} bytes)",
            remedy="build the library and the package from the same source",
        )
    return Library(ffi, lib, path)


# ---- diag -----------------------------------------------------------------------------------------------------------------
def text(pointer: Any) -> str:
    """A C string, "" for NULL."""
    ffi = library().ffi
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def diag_text(diag: Any) -> str:
    """One line for a trv_diag (struct or pointer)."""
    n = library()
    if n.ffi.typeof(diag).kind != "pointer":
        diag = n.ffi.addressof(diag)
    size = int(n.lib.trv_diag_print(diag, n.ffi.NULL, 0)) + 1
    out = n.ffi.new("char[]", size)
    n.lib.trv_diag_print(diag, out, size)
    return text(out)


# ---- tensors and kernels --------------------------------------------------------------------------------------------------
def dtype_code(x: Any) -> int:
    """trivet's dtype of a numpy array or torch tensor; KeyError for one that trivet has not."""
    from trivet.ir.interop import dtype_of

    return int(dtype_of(x))


def fill_tensor(out: Any, x: Any) -> None:
    """Describes a numpy array or torch CPU tensor (any strides) in a trv_tensor; None: an input that is not there.

    The memory stays the caller's and must outlive the use of out.
    """
    n = library()
    if x is None:
        out.data, out.dtype, out.rank = n.ffi.NULL, 0, 0
        return
    out.dtype = dtype_code(x)
    out.rank = x.ndim
    out.flags = 0
    if hasattr(x, "data_ptr"):
        address, strides = x.data_ptr(), x.stride()
    else:
        address, strides = x.__array_interface__["data"][0], [s // max(x.itemsize, 1) for s in x.strides]
    out.data = n.ffi.cast("uint8_t *", address)
    for i in range(x.ndim):
        out.dim[i] = x.shape[i]
        out.stride[i] = strides[i]


def _bytes(x: Any) -> Any:
    """A pointer to the bytes of a numpy array, numpy struct or bytes object, 8-byte aligned. Keeps them alive."""
    ffi = library().ffi
    data = x.tobytes() if hasattr(x, "tobytes") else bytes(x)
    out = ffi.new("uint64_t[]", max(1, (len(data) + 7) // 8))
    ffi.memmove(out, data, len(data))
    return out


def pack_bytes(op: int, attrs: Any, dtype: int, shape: Sequence[int]) -> int:
    """Bytes of the packed form of a weight, 0 when the op takes it as it is. attrs: the op's struct as numpy or bytes."""
    n = library()
    return int(n.lib.trvk_pack_bytes(op, _bytes(attrs), dtype, len(shape), n.ffi.new("int64_t[]", list(shape) or [0])))


def pack(op: int, attrs: Any, weight: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The packed form of a weight (numpy or torch CPU, any strides) as bytes, 64-byte aligned."""
    import numpy as np

    n = library()
    t = n.ffi.new("trv_tensor *")
    fill_tensor(t, weight)
    rank = int(t.rank)
    shape = n.ffi.new("int64_t[8]", [t.dim[i] for i in range(rank)])
    strides = n.ffi.new("int64_t[8]", [t.stride[i] for i in range(rank)])
    struct = _bytes(attrs)
    size = int(n.lib.trvk_pack_bytes(op, struct, t.dtype, rank, shape))
    if size == 0:
        raise Error(f"op {op} takes this weight unpacked")
    room = np.zeros(size + 64, np.uint8)
    skip = -room.ctypes.data % 64
    out = room[skip : skip + size]
    n.lib.trvk_pack(op, struct, t.dtype, rank, shape, strides, t.data, n.ffi.cast("void *", out.ctypes.data))
    return out


def rnn_tmp_bytes(attrs: Any, dtype: int, batch: int, inputs: int, hidden: int, proj: int = 0) -> int:
    """Scratch bytes of an rnn command. proj: size of the projection, 0 without."""
    return int(library().lib.trvk_rnn_tmp_bytes(_bytes(attrs), dtype, batch, inputs, hidden, proj))


def qrnn_tmp_bytes(attrs: Any, batch: int, inputs: int, hidden: int) -> int:
    """Scratch bytes of a qrnn command."""
    return int(library().lib.trvk_qrnn_tmp_bytes(_bytes(attrs), batch, inputs, hidden))


def conv_tmp_bytes(attrs: Any, cin: int, tiles: int) -> int:
    """Scratch bytes of a conv command with a weight packed for Winograd's algorithm. tiles: of the output, all images."""
    return int(library().lib.trvk_conv_tmp_bytes(_bytes(attrs), cin, tiles))


def mcu_conv_tmp_bytes(attrs: Any, channels: int) -> int:
    """Scratch bytes of a qconv command with a weight by rows. channels: of the input."""
    return int(library().lib.trvk_mcu_conv_tmp_bytes(_bytes(attrs), channels))


def mcu_matmul_tmp_bytes(rows: int, k: int) -> int:
    """Scratch bytes of a qmatmul command with a weight by rows. rows: of the left side, at most."""
    return int(library().lib.trvk_mcu_matmul_tmp_bytes(rows, k))


def isa_levels(op: int) -> list[str]:
    """The levels of instruction sets at which this machine runs other kernels of an operator, "ref" first."""
    n = library()
    names: list[str] = []
    while (name := n.lib.trvk_isa_name(op, len(names))) != n.ffi.NULL:
        names.append(n.ffi.string(name).decode())
    return names


def run_op(
    op: int,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attrs: Any,
    *,
    tmp: Sequence[Any] = (),
    code: Any = None,
    dims: Any = None,
    dim_table: Any = None,
    tiles: int = 0,
    isa: str | None = None,
) -> None:
    """Runs one command on this thread (trvk_run): for tests, benchmarks, constant folding.

    Args:
        op: number in enum Op.
        inputs, outputs, tmp: numpy arrays or torch CPU tensors of any strides; None for an input that is not there.
        attrs: the op's struct (numpy void or array of STRUCTS, or bytes).
        code: map instructions, a numpy array of STRUCTS["MapInstr"].
        dims: present values of the dimension table, a numpy intp array; written by nonzero and item.
        dim_table: a numpy array of STRUCTS["Dim"].
        tiles: how many tiles, 0: as the op likes.
        isa: a level of isa_levels, None for the best.

    Raises:
        Error: the op's check, or a fault of the data.
    """
    n = library()
    ffi = n.ffi
    args = [*inputs, *outputs, *tmp]
    c_args = ffi.new("trv_tensor[]", max(1, len(args)))
    for i, x in enumerate(args):
        fill_tensor(c_args[i], x)
    diag = ffi.new("trv_diag *")
    c_code = ffi.NULL if code is None else ffi.cast("trvf_map_instr *", _keep(code))
    c_dims = ffi.NULL if dims is None else ffi.cast("trv_dim *", dims.ctypes.data)
    c_table = ffi.NULL if dim_table is None else ffi.cast("trvf_dim *", dim_table.ctypes.data)
    status = n.lib.trvk_run(op, ffi.NULL if isa is None else isa.encode(), c_args, len(inputs), len(outputs), len(tmp),
                            _bytes(attrs), c_code, 0 if code is None else len(code), c_dims, c_table,
                            0 if dims is None else len(dims), tiles, diag)  # fmt: skip
    if status != OK:
        raise Error(diag_text(diag) or text(n.lib.trv_status_text(status)))


def _keep(array: Any) -> int:
    return int(array.ctypes.data)
