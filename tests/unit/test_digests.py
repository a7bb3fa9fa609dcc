"""Digests of logical tensors: what must not matter, what must, and both algorithms against an independent one."""

import numpy
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightlift.verify.digests import CHUNK_ELEMENTS, Algorithm, Probe, Scope, digests, span

ALGORITHMS: list[Algorithm] = ["xxh3", "lanes"]
SCOPES: list[Scope] = ["sample", "full"]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def digest(tensor: torch.Tensor, algorithm: Algorithm, *, scope: Scope = "full", version: int = 1, **more: torch.dtype) -> bytes:
    return digests([Probe(tensor, more.pop("dtype", tensor.dtype), **more)], algorithm, scope, version)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def reference_lanes(data: bytes, item: int) -> bytes:
    """`lanes`, written a second time in numpy, from its description."""

    def mix(words: numpy.ndarray) -> numpy.ndarray:
        words = (words ^ (words >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return words ^ (words >> numpy.uint64(31))

    golden = 0x9E3779B97F4A7C15
    mask = (1 << 64) - 1
    state = len(data)
    for at in range(0, len(data), CHUNK_ELEMENTS * item):
        piece = data[at : at + CHUNK_ELEMENTS * item]
        sums = [piece[: len(piece) // 8 * 8], piece[len(piece) // 8 * 8 :]]
        for part in sums:
            if not part:
                continue
            words = numpy.frombuffer(part.ljust(-(-len(part) // 8) * 8, b"\0"), dtype="<u8")
            for start in range(0, len(words), 1 << 20):
                some = words[start : start + (1 << 20)]
                with numpy.errstate(over="ignore"):
                    keys = mix(numpy.arange(1, len(some) + 1, dtype=numpy.uint64) * numpy.uint64(golden))
                    total = int(mix(some + keys).sum(dtype=numpy.uint64))
                    state = int(mix(numpy.array([(state * golden + total) & mask], dtype=numpy.uint64))[0])
    with numpy.errstate(over="ignore"):
        return int(mix(numpy.array([state ^ len(data)], dtype=numpy.uint64))[0]).to_bytes(8, "big")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0, 4), (2, 1000, 3)], ids=str)
def test_both_algorithms_against_an_independent_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = numbers(*shape, dtype=dtype) if dtype is not torch.bool else numbers(*shape, dtype=torch.uint8).bool()
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    assert digest(tensor, "xxh3") == xxhash.xxh3_64_digest(data)
    assert digest(tensor, "lanes") == reference_lanes(data, dtype.itemsize)


def test_lanes_over_several_pieces_and_chunks() -> None:
    tensor = numbers(2 * CHUNK_ELEMENTS + 13, dtype=torch.complex64)
    assert digest(tensor, "lanes") == reference_lanes(tensor.view(torch.uint8).numpy().tobytes(), 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scope", SCOPES)
def test_strides_padding_and_lazy_bits_do_not_matter(algorithm: Algorithm, scope: Scope) -> None:
    plain = numbers(300, 70)
    wide = torch.zeros(300, 100)
    wide[:, 10:80] = plain
    as_complex = torch.complex(torch.zeros(300, 70), -plain)
    for other in (plain.t().contiguous().t(), wide[:, 10:80], plain.clone().requires_grad_(), as_complex.conj().imag):
        assert digest(other, algorithm, scope=scope) == digest(plain, algorithm, scope=scope)


@given(st.data())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_changed_bits_change_the_digest(algorithm: Algorithm, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    tensor = numbers(count, dtype=torch.int16)
    flips = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(1, 0xFFFF), min_size=1, max_size=4))
    other = tensor.clone()
    for at, bits in flips.items():
        other[at] ^= bits - 0x10000 if bits > 0x7FFF else bits
    assert digest(tensor, algorithm) != digest(other, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_faults_that_a_sum_would_miss(algorithm: Algorithm) -> None:
    tensor = numbers(64, 32, dtype=torch.float64)
    signs = tensor.clone()
    signs[3, 4] *= -1
    signs[9, 1] *= -1
    rows = tensor.clone()
    rows[[5, 6]] = rows[[6, 5]]
    shifted = tensor.flatten().roll(1).view(64, 32)
    seen = {digest(t, algorithm) for t in (tensor, signs, rows, shifted, tensor.t().contiguous(), tensor[:63])}
    assert len(seen) == 6


def test_the_cast_of_a_tensor_has_the_digest_of_the_cast() -> None:
    tensor = torch.linspace(-3, 3, 5000)
    rounded = tensor.to(torch.bfloat16)
    assert digest(tensor, "xxh3", dtype=torch.bfloat16) == digest(rounded, "xxh3")
    via = {"dtype": torch.float32, "via": torch.bfloat16}
    assert digest(tensor, "xxh3", **via) == digest(rounded.float(), "xxh3") != digest(tensor, "xxh3")


@given(count=st.integers(0, 100_000), version=st.integers(0, 10**6))
def test_a_sample_is_one_run_inside(count: int, version: int) -> None:
    start, stop = span(count, "sample", version)
    assert 0 <= start <= stop <= count
    assert (stop > start) == (count > 0)
    assert span(count, "full", version) == (0, count)
    assert span(count, "off", version) == (0, 0)


def test_in_the_long_run_a_sample_sees_every_element() -> None:
    seen = torch.zeros(20_000, dtype=torch.bool)
    for version in range(0, 20000, 10):
        start, stop = span(20_000, "sample", version)
        seen[start:stop] = True
    assert bool(seen.all())


@pytest.mark.parametrize("shape", [(3, 5), (700,), (5, 3)])
def test_looking_at_a_tensor_leaves_its_storage_as_it_was(shape: tuple[int, ...]) -> None:
    """A trainer whose weights were digested once can still be offloaded: numpy would have marked the storage as shared."""
    tensor = torch.randn(*shape)
    for view in (tensor, tensor.t() if tensor.ndim == 2 else tensor[::2]):
        digests([Probe(view, torch.float32), Probe(view, torch.bfloat16)], "xxh3", "full", 1)
        assert view.untyped_storage().resizable()
