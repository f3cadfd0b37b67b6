"""A page that classifies pictures in the browser: EfficientNet-Lite0, run by trivet's WebAssembly module.

python examples/07_wasm/make.py [FOLDER] [--serve PORT]      (needs trivet[cross], and the packages of tests/e2e/requirements.txt)

FOLDER (default: page) then holds all that a web server has to serve: index.html and page.mjs, trivet.mjs and trivet.wasm, net.trv,
labels.json, three pictures. Everything runs in the browser; no picture leaves it.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import sys
from pathlib import Path

import trivet
from trivet.build import build

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "01_hello"))
from hello import labels, load_model, load_picture, package_file

HERE = Path(__file__).resolve().parent
PICTURES = ("chelsea.png", "coffee.png", "rocket.jpg")


def make(folder: Path, runtime: Path | None = None, quantize: str | None = None) -> Path:
    """Writes the page into folder. runtime: what `trivet build --target wasm32-wasi` wrote; default: built now. quantize: a
    recipe such as "w8", a quarter of the bytes to load; None: float32, quicker to run.
    """
    pictures = package_file("skimage", "data")
    folder.mkdir(parents=True, exist_ok=True)
    example = load_picture(pictures / PICTURES[0])
    trivet.export(load_model(), (example,), quantize=quantize).save(folder / "net.trv")
    (folder / "labels.json").write_text(json.dumps(labels()))
    library = (runtime or build("wasm32-wasi", folder / ".wasm32-wasi").folder) / "lib"
    copies = [library / "trivet.wasm", library / "trivet.mjs", HERE / "index.html", HERE / "page.mjs"]
    for source in [*copies, *(pictures / name for name in PICTURES)]:
        shutil.copyfile(source, folder / source.name)
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files, with the types that browsers ask for."""

    def guess_type(self, path: str) -> str:
        """A module's code, or what the name says."""
        kinds = {".mjs": "text/javascript", ".wasm": "application/wasm"}
        return kinds.get(Path(path).suffix) or super().guess_type(path)

    def log_message(self, *_: object) -> None:
        """Quietly."""


def server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Serves folder on this machine; port 0: any free one."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("page"))
    parser.add_argument("--serve", type=int, metavar="PORT")
    options = parser.parse_args()
    folder = make(options.folder)
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        print(f"{path.stat().st_size:>10,}  {path}")
    if options.serve is not None:
        with server(folder, options.serve) as s:
            print(f"http://127.0.0.1:{s.server_address[1]}/?picture={PICTURES[0]}")
            s.serve_forever()


if __name__ == "__main__":
    main()
