// trivet.mjs - runs trivet programs in a browser, in node, in any engine with WebAssembly and SIMD.
//
//   import { load } from "./trivet.mjs";
//   const net = await load("net.trv");            // trivet.wasm is looked for beside this file
//   const { outputs: [y] } = net.run([pixels]);   // Float32Array ... in, in the order of net.inputs
//   y.data, y.shape, y.dtype
//
// Errors are exceptions with the runtime's own text.

const NAMES = ["none", "bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"];
const ARRAYS = [null, Uint8Array, Uint8Array, Int8Array, Int16Array, Int32Array, BigInt64Array,
  globalThis.Float16Array ?? Uint16Array, Uint16Array, Float32Array, Float64Array]; // bf16: its bits
const arrayOf = (dtype) => ARRAYS[NAMES.indexOf(dtype)];
const SLOT = 216; // bytes of struct slot in exports.c
const MAX_RANK = 8;
const EBADF = 8, ENOSYS = 52;

/** What the module imports of WASI: a clock and refusals, since it opens no files. */
function imports(memory) {
  const view = () => new DataView(memory().buffer);
  const known = {
    clock_time_get: (_id, _precision, out) => {
      view().setBigUint64(out, BigInt(Math.round(performance.now() * 1e6)), true);
      return 0;
    },
    environ_sizes_get: (count, bytes) => {
      view().setUint32(count, 0, true);
      view().setUint32(bytes, 0, true);
      return 0;
    },
    environ_get: () => 0,
    fd_prestat_get: () => EBADF, // no folders are open
    proc_exit: (status) => { throw new Error(`trivet.wasm ended with status ${status}`); },
  };
  return { wasi_snapshot_preview1: new Proxy({}, { get: (_, name) => known[name] ?? (() => ENOSYS) }) };
}

/** Bytes of a URL (browser), a path (node), a Response, or bytes. */
async function bytesOf(source) {
  const it = await source;
  if (it instanceof Uint8Array) return it;
  if (it instanceof ArrayBuffer) return new Uint8Array(it);
  if (typeof Response !== "undefined" && it instanceof Response) {
    if (!it.ok) throw new Error(`${it.url}: ${it.status} ${it.statusText}`);
    return new Uint8Array(await it.arrayBuffer());
  }
  const url = it instanceof URL ? it : new URL(String(it), globalThis.location?.href ?? `file://${globalThis.process?.cwd()}/`);
  if (url.protocol === "file:" && globalThis.process?.versions?.node) {
    const { readFile } = await import("node:fs/promises");
    return readFile(url);
  }
  return bytesOf(fetch(url));
}

/** A slot of a program: dtype ("f32"), name, shape with null where the extent is dynamic, then min and max tell. */
function readSlot(memory, at) {
  const v = new DataView(memory.buffer, at, SLOT);
  const u = (i) => v.getUint32(4 * i, true);
  const row = (offset) => Array.from({ length: u(3) }, (_, k) => v.getFloat64(offset + 8 * k, true));
  const name = new TextDecoder().decode(new Uint8Array(memory.buffer, u(0), u(1)).slice());
  return { name, dtype: NAMES[u(2)], data: u(4), size: u(5),
    shape: row(24).map((n) => (n < 0 ? null : n)), min: row(88), max: row(152) };
}

/** One method of a program. */
class Entry {
  /** Made by Net. */
  constructor(net, index) {
    const e = net._slot("trvw_entry", index);
    this.name = e.name;
    this._net = net;
    this._index = index;
    const slots = (output, length) => Array.from({ length }, (_, i) => {
      const { name, dtype, shape, min, max } = net._slot("trvw_slot", index, output, i);
      return { name, dtype, shape, min, max };
    });
    this.inputs = slots(0, e.data);
    this.outputs = slots(1, e.size);
  }

  /**
   * Runs it. inputs: a typed array each, or {data, shape} where extents are dynamic. The outputs' data are copies.
   * Returns {outputs: [{name, dtype, shape, data}], ms: time of the run itself}.
   */
  run(inputs) {
    const net = this._net;
    if (inputs.length !== this.inputs.length) throw new Error(`${this.name} takes ${this.inputs.length} inputs, got ${inputs.length}`);
    const given = inputs.map((x, i) => this._check(x, i));
    given.forEach(({ shape }, i) => net._shape(this._index, i, this.inputs[i].dtype, shape));
    net._do("trvw_plan", this._index);
    given.forEach(({ data }, i) => {
      const t = net._slot("trvw_tensor", this._index, 0, i);
      new Uint8Array(net._memory.buffer, t.data, t.size).set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    });
    const begin = performance.now();
    net._do("trvw_run", this._index);
    const ms = performance.now() - begin;
    const outputs = this.outputs.map(({ name }, i) => {
      const t = net._slot("trvw_tensor", this._index, 1, i);
      const data = new (arrayOf(t.dtype))(net._memory.buffer.slice(t.data, t.data + t.size));
      return { name, dtype: t.dtype, shape: t.shape, data };
    });
    return { outputs, ms };
  }

  _check(x, i) {
    const slot = this.inputs[i], about = `input ${i} "${slot.name}"`;
    const data = ArrayBuffer.isView(x) ? x : x.data;
    const shape = (ArrayBuffer.isView(x) ? null : x.shape) ?? slot.shape;
    if (shape.includes(null)) throw new Error(`${about} has dynamic sizes: give {data, shape}`);
    const kind = arrayOf(slot.dtype);
    if (!(data instanceof kind)) throw new Error(`${about} takes a ${kind.name}, got ${data?.constructor?.name}`);
    const count = shape.reduce((n, k) => n * k, 1);
    if (data.length !== count) throw new Error(`${about} of shape [${shape}] takes ${count} numbers, got ${data.length}`);
    return { data, shape };
  }
}

/** A program with memory of its own. Attributes: entries, by name; inputs, outputs, run: of the first entry. */
class Net {
  /** Made by load. */
  constructor(instance) {
    this._c = instance.exports;
    this._memory = instance.exports.memory;
  }

  _open(file, weights) {
    const put = (bytes) => {
      if (!bytes) return 0;
      const at = this._c.trvw_new(bytes.length);
      if (!at) throw new Error("out of memory");
      new Uint8Array(this._memory.buffer).set(bytes, at);
      return at;
    };
    this._at = put(new Uint8Array(SLOT));
    this._net = this._c.trvw_open(put(file), file.length, put(weights), weights?.length ?? 0);
    if (!this._net) throw new Error("out of memory");
    const text = this._error();
    if (text) throw new Error(text);
    const entries = Array.from({ length: this._c.trvw_entries(this._net) }, (_, i) => new Entry(this, i));
    this.entries = Object.fromEntries(entries.map((e) => [e.name, e]));
    ({ inputs: this.inputs, outputs: this.outputs } = entries[0]);
    this.run = (inputs) => entries[0].run(inputs);
    return this;
  }

  /** Puts state (mutable buffers) back to its first values. */
  reset() { this._do("trvw_reset"); }

  /** Bytes of the module's memory: program, weights, arenas; it never shrinks. */
  get bytes() { return this._memory.buffer.byteLength; }

  _error() {
    const bytes = new Uint8Array(this._memory.buffer, this._c.trvw_error(this._net), 512);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  _do(name, ...args) {
    if (this._c[name](this._net, ...args)) throw new Error(this._error());
  }

  _slot(name, ...args) {
    this._do(name, ...args, this._at);
    return readSlot(this._memory, this._at);
  }

  _shape(entry, i, dtype, shape) {
    if (shape.length > MAX_RANK) throw new Error(`at most ${MAX_RANK} axes`);
    const v = new DataView(this._memory.buffer, this._at, SLOT);
    v.setUint32(8, NAMES.indexOf(dtype), true);
    v.setUint32(12, shape.length, true);
    shape.forEach((n, k) => v.setFloat64(24 + 8 * k, n, true));
    this._do("trvw_shape", entry, i, this._at);
  }
}

/**
 * Opens a program: a URL or path, a Response (also a promise of it), or bytes. options.weights: its second file, alike;
 * options.wasm: the module, alike (default: trivet.wasm beside this file). Each net has a memory of its own.
 */
export async function load(program, { weights, wasm = new URL("./trivet.wasm", import.meta.url) } = {}) {
  const [file, second, code] = await Promise.all([bytesOf(program), weights ? bytesOf(weights) : null, bytesOf(wasm)]);
  let instance = null;
  ({ instance } = await WebAssembly.instantiate(code, imports(() => instance.exports.memory)));
  instance.exports._initialize();
  return new Net(instance)._open(file, second);
}
