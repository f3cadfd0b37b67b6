// What trivet.mjs says of mistakes, as a JSON list: node wrong.mjs TRIVET.MJS PROGRAM.trv
const { load } = await import(process.argv[2]);
const net = await load(process.argv[3]);
const said = [];
const mistakes = [
  () => net.run([]),
  () => net.run([new Int8Array(150528)]),
  () => net.run([new Float32Array(3)]),
  () => load(new Uint8Array(100)),
  () => load("/nowhere"),
  () => net.run([{ data: new Float32Array(1200), shape: [1, 3, 20, 20] }]),
];
for (const mistake of mistakes) {
  try {
    await mistake();
    said.push("nothing");
  } catch (e) {
    said.push(e.message);
  }
}
console.log(JSON.stringify(said));
