// Classifies the picture that is chosen, or that the address names: ?picture=chelsea.png
import { load } from "./trivet.mjs";

const SIZE = 224, MEAN = [0.485, 0.456, 0.406], DEVIATION = [0.229, 0.224, 0.225];

/** RGBA bytes of SIZE x SIZE to what the network takes: Float32Array [1, 3, SIZE, SIZE]. */
export function normalise(rgba) {
  const plane = SIZE * SIZE, x = new Float32Array(3 * plane);
  for (let c = 0; c < 3; c++)
    for (let i = 0; i < plane; i++) x[c * plane + i] = (rgba[4 * i + c] / 255 - MEAN[c]) / DEVIATION[c];
  return x;
}

/** The likeliest classes of RGBA bytes: {top: [{label, probability}], ms}. */
export function classify(net, labels, rgba, count = 5) {
  const { outputs: [{ data }], ms } = net.run([normalise(rgba)]);
  const most = data.reduce((a, b) => Math.max(a, b)), e = Array.from(data, (v) => Math.exp(v - most));
  const sum = e.reduce((a, b) => a + b);
  const top = e.map((v, i) => ({ label: labels[i], probability: v / sum })).sort((a, b) => b.probability - a.probability);
  return { top: top.slice(0, count), ms };
}

/** The middle of a picture, as hello.py cuts it, on the canvas; its RGBA bytes. */
function draw(canvas, picture) {
  const side = Math.trunc(Math.min(picture.width, picture.height) * 0.875);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, (picture.width - side) >> 1, (picture.height - side) >> 1, side, side, 0, 0, SIZE, SIZE);
  return context.getImageData(0, 0, SIZE, SIZE).data;
}

async function start() {
  const find = (id) => document.getElementById(id);
  const state = find("state");
  const fail = (e) => { state.textContent = `error: ${e.message}`; };
  const [net, labels] = await Promise.all([load("net.trv"), fetch("labels.json").then((r) => r.json())]);
  async function show(blob) {
    const { top, ms } = classify(net, labels, draw(find("canvas"), await createImageBitmap(blob)));
    find("result").replaceChildren(...top.map(({ label, probability }) => {
      const item = document.createElement("li");
      item.textContent = `${(100 * probability).toFixed(2)} %  ${label}`;
      return item;
    }));
    state.textContent = `done in ${ms.toFixed(1)} ms, with ${(net.bytes / 1e6).toFixed(1)} MB of memory`;
  }
  const fetched = (name) => fetch(name).then((r) => r.blob()).then(show).catch(fail);
  find("file").onchange = ({ target }) => show(target.files[0]).catch(fail);
  for (const button of document.querySelectorAll("button")) button.onclick = () => fetched(button.value);
  state.textContent = "ready";
  const named = new URLSearchParams(location.search).get("picture");
  if (named) await fetched(named);
}

if (typeof document !== "undefined") start().catch((e) => { document.getElementById("state").textContent = `error: ${e.message}`; });
