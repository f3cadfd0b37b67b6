"""Peers that start from an ONNX model: ONNX Runtime and MNN."""

import os

from adapter import Adapter, out


def export_onnx(work, folder):
    """The fp32 ONNX model, made once and shared by every adapter and precision that starts from ONNX."""
    import torch

    path = os.path.join(os.path.dirname(folder), "onnxruntime", work.name + ".fp32.onnx")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.onnx.export(work.model, work.inputs, path, dynamo=True, external_data=False, verbose=False)
    return path


def _gemm_to_matmul(model):
    """MatMulNBits takes MatMul only; a 2-D linear without bias is exported as Gemm(transB=1)."""
    from onnx import helper, numpy_helper

    inits = {i.name: i for i in model.graph.initializer}
    for n in model.graph.node:
        at = {a.name: helper.get_attribute_value(a) for a in n.attribute}
        if (
            n.op_type == "Gemm"
            and len(n.input) == 2
            and n.input[1] in inits
            and at.get("transB") == 1
            and not at.get("transA")
            and at.get("alpha", 1.0) == 1.0
        ):
            w = numpy_helper.to_array(inits[n.input[1]]).T.copy()
            name = n.input[1] + "_t"
            model.graph.initializer.append(numpy_helper.from_array(w, name))
            new = helper.make_node("MatMul", [n.input[0], name], list(n.output), name=n.name)
            n.CopyFrom(new)
    used = {i for n in model.graph.node for i in n.input}
    for i in [i for i in model.graph.initializer if i.name not in used]:
        model.graph.initializer.remove(i)
    return model


class ONNXRuntime(Adapter):
    """torch.onnx (dynamo) -> CPU execution provider (MLAS kernels)."""

    name = "onnxruntime"
    precisions = ("fp32", "int8", "int8dyn", "w4", "w8")

    def prepare(self, work, precision, folder):
        path = out(folder, work, precision, "onnx")
        base = export_onnx(work, folder)
        if precision == "fp32":
            return [base]
        if precision in ("w4", "w8"):
            import onnx
            from onnxruntime.quantization.matmul_nbits_quantizer import (
                DefaultWeightOnlyQuantConfig,
                MatMulNBitsQuantizer,
            )

            cfg = DefaultWeightOnlyQuantConfig(
                block_size=32, is_symmetric=True, accuracy_level=4, bits=int(precision[1:])
            )
            q = MatMulNBitsQuantizer(_gemm_to_matmul(onnx.load(base)), algo_config=cfg)
            q.process()
            onnx.save(q.model.model, path)
        else:
            import onnxruntime.quantization as oq
            from onnxruntime.quantization.shape_inference import quant_pre_process

            pre = path.replace(".onnx", ".pre.onnx")
            quant_pre_process(base, pre)
            if precision == "int8dyn":
                oq.quantize_dynamic(pre, path, weight_type=oq.QuantType.QInt8, per_channel=True)
            else:
                import onnx

                names = [i.name for i in onnx.load(pre).graph.input]

                class Reader(oq.CalibrationDataReader):
                    rows = iter([dict(zip(names, [t.numpy() for t in c])) for c in work.calib])

                    def get_next(self):
                        return next(self.rows, None)

                oq.quantize_static(
                    pre,
                    path,
                    Reader(),
                    quant_format=oq.QuantFormat.QDQ,
                    per_channel=True,
                    activation_type=oq.QuantType.QUInt8,
                    weight_type=oq.QuantType.QInt8,
                )
            os.remove(pre)
        return [path]

    def runtime_import(self):
        import onnxruntime  # noqa: F401

    def load(self, paths, threads):
        import onnxruntime as ort

        so = ort.SessionOptions()
        so.intra_op_num_threads = threads
        so.inter_op_num_threads = 1
        s = ort.InferenceSession(paths[0], so, providers=["CPUExecutionProvider"])
        names = [i.name for i in s.get_inputs()]
        return lambda arrays: s.run(None, dict(zip(names, arrays)))


class MNN(Adapter):
    """ONNX -> mnnconvert -> MNN (own x86 assembly kernels); w8/w4 are its weight-only modes."""

    name = "mnn"
    precisions = ("fp32", "w8", "w4")

    def prepare(self, work, precision, folder):
        import subprocess
        import sys

        base = export_onnx(work, folder)
        path = out(folder, work, precision, "mnn")
        cmd = [
            os.path.join(os.path.dirname(sys.executable), "mnnconvert"),
            "-f",
            "ONNX",
            "--modelFile",
            base,
            "--MNNModel",
            path,
            "--bizCode",
            "bench",
        ]
        if precision != "fp32":
            cmd += ["--weightQuantBits", precision[1:], "--weightQuantBlock", "32"]
        p = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not os.path.exists(path):
            raise RuntimeError("mnnconvert failed: " + p.stdout[-300:])
        import onnx

        g = onnx.load(base).graph
        with open(path + ".io", "w") as f:
            f.write(",".join(i.name for i in g.input) + "\n" + ",".join(o.name for o in g.output))
        return [path, path + ".io"]

    def runtime_import(self):
        import MNN  # noqa: F401
        import MNN.expr  # noqa: F401
        import MNN.nn  # noqa: F401

    def load(self, paths, threads):
        import MNN
        import MNN.expr as E
        import numpy as np

        ins, outs = (line.split(",") for line in open(paths[1]).read().split("\n"))
        low = ".fp32." not in paths[0]
        rt = MNN.nn.create_runtime_manager(
            ({"backend": "CPU", "numThread": threads, "precision": "high", "memory": "low" if low else "normal"},)
        )
        net = MNN.nn.load_module_from_file(paths[0], ins, outs, runtime_manager=rt)
        vars_ = {}

        def run(arrays):
            xs = []
            for i, a in enumerate(arrays):
                if a.dtype == np.int64:
                    a = a.astype(np.int32)
                if i not in vars_:
                    vars_[i] = E.placeholder(list(a.shape), E.NCHW, E.int if a.dtype == np.int32 else E.float)
                vars_[i].write(a)
                xs.append(vars_[i])
            ys = net.forward(xs)
            return [np.array(y.read()) for y in (ys if isinstance(ys, (list, tuple)) else [ys])]

        run.keep = (rt, net)
        return run
