// numpy's .npy files of numbers, as typed arrays.
import { readFileSync } from "node:fs";

const ARRAYS = { "<f4": Float32Array, "<f8": Float64Array, "<i8": BigInt64Array, "<i4": Int32Array, "|i1": Int8Array, "|u1": Uint8Array };

export function readNpy(path) {
  const raw = readFileSync(path), length = raw.readUInt16LE(8);
  const header = raw.toString("latin1", 10, 10 + length);
  const kind = ARRAYS[/'descr': '([^']+)'/.exec(header)[1]];
  return new kind(raw.buffer.slice(raw.byteOffset + 10 + length, raw.byteOffset + raw.length));
}
