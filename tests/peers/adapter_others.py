"""Peers that convert from torch themselves: OpenVINO, LiteRT, ncnn."""

import os

from adapter import Adapter, out


class OpenVINO(Adapter):
    """torch.export -> IR -> CPU plugin (oneDNN fork with brgemm JIT). bf16 is the plugin's own default on this CPU
    family where it has native bf16, so fp32 is asked for by name."""

    name = "openvino"
    precisions = ("fp32", "bf16", "int8", "w4", "w8")

    def prepare(self, work, precision, folder):
        import openvino as ov
        import torch

        model = ov.convert_model(torch.export.export(work.model, work.inputs))
        if precision == "int8":
            import nncf

            kw = {}
            if "minilm" in work.name or "vit" in work.name:
                kw["model_type"] = nncf.ModelType.TRANSFORMER
            rows = [[t.numpy() for t in c] for c in work.calib]
            model = nncf.quantize(model, nncf.Dataset(rows), subset_size=len(rows), **kw)
        elif precision == "w4":
            import nncf

            adv = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.IGNORE)
            model = nncf.compress_weights(
                model,
                mode=nncf.CompressWeightsMode.INT4_SYM,
                group_size=32,
                ratio=1.0,
                all_layers=True,
                advanced_parameters=adv,
            )
        elif precision == "w8":
            import nncf

            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        path = out(folder, work, precision, "ov.xml")
        ov.save_model(model, path, compress_to_fp16=False)
        return [path, path[:-3] + "bin"]

    def runtime_import(self):
        import openvino  # noqa: F401

    def load(self, paths, threads):
        import openvino as ov

        core = ov.Core()
        opts = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16" if ".bf16." in paths[0] else "f32",
        }
        compiled = core.compile_model(paths[0], "CPU", opts)
        req = compiled.create_infer_request()
        n = len(compiled.outputs)

        def run(arrays):
            req.infer(arrays, share_inputs=True, share_outputs=True)
            return [req.get_output_tensor(i).data for i in range(n)]

        run.keep = (core, compiled)
        return run


def _int32(t):
    return t.numpy() if t.dtype.is_floating_point else t.numpy().astype("int32")


class LiteRT(Adapter):
    """litert-torch -> .tflite -> interpreter with its default XNNPACK delegate."""

    name = "litert"
    precisions = ("fp32", "int8", "int8dyn", "w8", "w4", "w4c")  # w4c: one scale per output channel

    def prepare(self, work, precision, folder):
        import litert_torch

        path = out(folder, work, precision, "tflite")
        base = out(folder, work, "fp32", "tflite")
        if not os.path.exists(base):
            litert_torch.convert(work.model, work.inputs).export(base)
        if precision != "fp32":
            from ai_edge_litert.interpreter import Interpreter
            from ai_edge_quantizer import quantizer, recipe

            q = quantizer.Quantizer(base)
            stats = None
            if precision == "int8":
                q.load_quantization_recipe(recipe.static_wi8_ai8())
                sig = Interpreter(base).get_signature_list()
                key = next(iter(sig))
                names = sig[key]["inputs"]
                stats = q.calibrate({key: [{n: _int32(t) for n, t in zip(names, c)} for c in work.calib]})
            elif precision in ("int8dyn", "w8"):
                q.load_quantization_recipe(recipe.dynamic_wi8_afp32())
            elif precision == "w4c":
                q.load_quantization_recipe(recipe.dynamic_wi4c_afp32())
            else:
                q.load_quantization_recipe(recipe.dynamic_wi4b32_afp32())
            q.quantize(stats).export_model(path, overwrite=True)
        return [path]

    def runtime_import(self):
        from ai_edge_litert.interpreter import Interpreter  # noqa: F401

    def load(self, paths, threads):
        import numpy as np
        from ai_edge_litert.interpreter import Interpreter

        it = Interpreter(paths[0], num_threads=threads)
        it.allocate_tensors()
        key = next(iter(it.get_signature_list()))
        sig = it.get_signature_list()[key]
        by_name = {d["name"]: d for d in it.get_input_details()}
        ins = []
        for i, n in enumerate(sorted(sig["inputs"], key=lambda s: int(s.rsplit("_", 1)[-1]))):
            hit = [d for k, d in by_name.items() if k.split(":")[0].endswith(n)]
            ins.append((hit[0] if hit else it.get_input_details()[i])["index"])
        outs = [d["index"] for d in sorted(it.get_output_details(), key=lambda d: d["name"])]
        types = {d["index"]: d for d in it.get_input_details() + it.get_output_details()}
        cache = {}  # a fully integer graph takes int8 input: converted once, outside what is timed

        def convert(i, a):
            want = types[i]["dtype"]
            if a.dtype == want:
                return a
            if (i, id(a)) not in cache:
                scale, zero = types[i]["quantization"]
                q = np.clip(np.round(a / scale) + zero, -128, 127) if scale else a
                cache[i, id(a)] = (q.astype(want), a)
            return cache[i, id(a)][0]

        def back(i):
            y = it.get_tensor(i)
            scale, zero = types[i]["quantization"]
            return (y.astype(np.float32) - zero) * np.float32(scale) if scale and y.dtype == np.int8 else y

        def run(arrays):
            for i, a in zip(ins, arrays):
                it.set_tensor(i, convert(i, a))
            it.invoke()
            return [back(i) for i in outs]

        return run


class NCNN(Adapter):
    """pnnx -> ncnn (own hand-written x86 kernels). Its default options keep less than fp32 between layers; they are
    the precision called fp16 here, and fp32 switches them off."""

    name = "ncnn"
    precisions = ("fp32", "fp16")

    def prepare(self, work, precision, folder):
        import subprocess

        import pnnx
        import torch

        stem = out(folder, work, precision, "x")[:-2]
        pt = os.path.abspath(stem + ".pt")
        torch.jit.trace(work.model, work.inputs, check_trace=False).save(pt)
        shapes = ",".join(
            str(list(t.shape)).replace(" ", "") + ("i64" if not t.dtype.is_floating_point else "f32")
            for t in work.inputs
        )
        exe = os.path.join(os.path.dirname(pnnx.__file__), "bin", "pnnx")
        if not os.path.exists(exe):
            exe = getattr(pnnx, "EXEC_PATH", "pnnx")
        subprocess.run(
            [exe, pt, f"inputshape={shapes}", "fp16=0"],
            check=True,
            cwd=os.path.dirname(pt),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        base = pt[:-3].replace("-", "_")
        for junk in (".pt", ".pnnx.param", ".pnnx.bin", ".pnnx.onnx", "_pnnx.py", "_ncnn.py"):
            for b in (base, base.replace(".", "_"), pt[:-3]):
                if os.path.exists(b + junk):
                    os.remove(b + junk)
        return [stem + ".ncnn.param", stem + ".ncnn.bin"]

    def runtime_import(self):
        import ncnn  # noqa: F401

    def load(self, paths, threads):
        import ncnn
        import numpy as np

        net = ncnn.Net()
        net.opt.num_threads = threads
        if ".fp32." in paths[0]:
            for o in (
                "use_fp16_packed",
                "use_fp16_storage",
                "use_fp16_arithmetic",
                "use_bf16_packed",
                "use_bf16_storage",
            ):
                if hasattr(net.opt, o):
                    setattr(net.opt, o, False)
        if net.load_param(paths[0]) or net.load_model(paths[1]):
            raise RuntimeError("ncnn could not load the model")
        outs = net.output_names()

        def run(arrays):
            ex = net.create_extractor()
            for i, a in enumerate(arrays):
                a = a[0] if a.ndim > 1 else a
                ex.input(f"in{i}", ncnn.Mat(a.astype(np.int32) if a.dtype == np.int64 else a))
            return [np.array(ex.extract(o)[1]) for o in outs]

        run.keep = net
        return run
