// Outputs of a program through trivet.mjs, as JSON: node module.mjs TRIVET.MJS PROGRAM.trv INPUT.npy ...
import { readNpy } from "./npy.mjs";

const { load } = await import(process.argv[2]);
const net = await load(process.argv[3]);
const inputs = process.argv.slice(4).map(readNpy);
const runs = [0, 1, 2].map(() => net.run(inputs).outputs);
const texts = runs.map((outputs) => JSON.stringify(outputs.map(({ shape, data }) =>
  ({ shape, bytes: Buffer.from(data.buffer).toString("hex") }))));
if (new Set(texts).size !== 1) throw new Error("runs differ");
console.log(texts[0]);
