"""ExecuTorch: .pte with the XNNPACK delegate, run through the wheel's pybindings."""

from adapter import Adapter, out


class ExecuTorch(Adapter):
    """.pte with the XNNPACK delegate, run through the wheel's pybindings."""

    name = "executorch"
    precisions = ("fp32", "int8", "int8dyn", "w4")

    def prepare(self, work, precision, folder):
        import torch
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        model = work.model
        if precision in ("int8", "int8dyn"):
            from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
                XNNPACKQuantizer,
                get_symmetric_quantization_config,
            )
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

            q = XNNPACKQuantizer().set_global(
                get_symmetric_quantization_config(is_per_channel=True, is_dynamic=precision == "int8dyn")
            )
            m = prepare_pt2e(torch.export.export(model, work.inputs).module(), q)
            for c in work.calib:
                m(*c)
            model = convert_pt2e(m)
        elif precision == "w4":  # 8da4w: int8 dynamic activations, int4 weights in groups of 32
            import torchao.quantization as tq
            from torchao.quantization.granularity import PerGroup
            from torchao.utils import unwrap_tensor_subclass

            tq.quantize_(
                model,
                tq.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
            )
            model = unwrap_tensor_subclass(model)
        ep = torch.export.export(model, work.inputs)
        parts = [XnnpackPartitioner()]
        if precision in ("w4", "int8dyn"):  # as ExecuTorch's own LLM export does: dynamic-quantised linears first
            from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType

            parts = [
                XnnpackPartitioner(config_precisions=ConfigPrecisionType.DYNAMIC_QUANT, per_op_mode=True),
                XnnpackPartitioner(),
            ]
        program = to_edge_transform_and_lower(ep, partitioner=parts).to_executorch()
        path = out(folder, work, precision, "pte")
        with open(path, "wb") as f:
            program.write_to_file(f)
        self.note = self._ops_left(program)
        return [path]

    @staticmethod
    def _ops_left(program):
        """Which operators stayed outside the delegate, and how many delegate calls there are."""
        plan = program.executorch_program.execution_plan[0]
        kernels, delegates = {}, 0
        for chain in plan.chains:
            for ins in chain.instructions:
                kind = type(ins.instr_args).__name__
                if kind == "KernelCall":
                    op = plan.operators[ins.instr_args.op_index]
                    kernels[op.name] = kernels.get(op.name, 0) + 1
                elif kind == "DelegateCall":
                    delegates += 1
        return f"{delegates} delegate calls; outside: {kernels}"

    def runtime_import(self):
        import executorch.runtime  # noqa: F401
        from executorch.extension.pybindings import portable_lib  # noqa: F401

    def load(self, paths, threads):
        import torch
        from executorch.extension.pybindings import portable_lib
        from executorch.runtime import Runtime, Verification

        portable_lib._unsafe_reset_threadpool(threads)
        torch.set_num_threads(threads)
        program = Runtime.get().load_program(paths[0], verification=Verification.Minimal)
        method = program.load_method("forward")

        def run(arrays):
            return [t.numpy() for t in method.execute([torch.from_numpy(a) for a in arrays])]

        run.keep = (program, method)
        return run


class ExecuTorchWritten(ExecuTorch):
    """The same with attention written out by the user, which its partitioner delegates better than the fused operator."""

    name = "executorch-written"
    precisions = ("fp32", "int8", "int8dyn")

    def takes(self, workload):
        from workloads import ATTENTION

        return workload in ATTENTION

    def prepare(self, work, precision, folder):
        from workloads import written_out

        with written_out():
            return super().prepare(work, precision, folder)
