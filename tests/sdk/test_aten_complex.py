"""Complex arithmetic inside a graph, and Fourier transforms."""

from __future__ import annotations

import torch
from eager import check


def test_rotary_embedding() -> None:
    def f(x: torch.Tensor, angle: torch.Tensor) -> list[torch.Tensor]:
        z = torch.view_as_complex(x.reshape(2, 6, 4, 2))
        w = torch.polar(torch.ones_like(angle), angle)
        y = torch.view_as_real(z * w.unsqueeze(0)).flatten(2)
        c = torch.complex(angle, angle + 1)
        return [y, (z + w).abs(), (z - w).real, z.conj().imag, z.angle(), torch.view_as_real(z / w), (z * 2).imag, (c / 2).real,
                z.sum(1).real, torch.cat([z, z]).imag, z.permute(2, 1, 0)[1:].real, w.exp().real, (z * w).to(torch.complex64).imag]  # fmt: skip

    check(f, torch.randn(2, 6, 8), torch.rand(6, 4) * 6)


def test_transforms() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        a = torch.fft.rfft(x)
        return [a.real, a.imag, torch.fft.irfft(a), torch.fft.irfft(a, n=9), torch.fft.fft(x).imag, torch.fft.fftn(x, dim=(1, 2)).real, torch.fft.fft2(x, norm="ortho").real,
                torch.fft.ifft(torch.fft.fft(x)).real, torch.fft.rfft(x, norm="ortho").abs(), torch.fft.rfft2(x).real, torch.fft.irfft2(torch.fft.rfft2(x), norm="backward"),
                torch.fft.fft(x, dim=1).real, torch.fft.rfft(x, n=8).real]  # fmt: skip

    check(f, torch.randn(2, 5, 10), atol=1e-4)


def test_spectrogram() -> None:
    w = torch.hann_window(16)

    def f(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        s = torch.stft(x, 16, 4, window=w, return_complex=True)
        return [s.abs(), torch.view_as_real(s), torch.istft(s, 16, 4, window=w)]

    check(f, torch.randn(2, 64), w, atol=1e-4)
