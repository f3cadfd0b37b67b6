// Classifies raw RGBA pixels with the page's own code, as JSON: node page.mjs FOLDER-OF-THE-PAGE PIXELS
import { readFileSync } from "node:fs";

const folder = process.argv[2];
const { load } = await import(`${folder}/trivet.mjs`);
const { classify } = await import(`${folder}/page.mjs`);
const net = await load(`${folder}/net.trv`);
console.log(JSON.stringify(classify(net, JSON.parse(readFileSync(`${folder}/labels.json`)), readFileSync(process.argv[3]))));
