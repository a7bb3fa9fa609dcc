"""On a GPU: the device digest is the host's, tensors on a device take part in a sync, kept device memory is seen.

Run by hand on a machine with a CUDA device (`pytest tests/gpu`); docs/benchmarks/device-digest.md has the numbers.
"""

import json
import os
import pathlib
import time

import pytest
import torch

from weightlift import LoaderError
from weightlift.errors import DigestMismatch
from weightlift.loaders import MappingLoader
from weightlift.sources import MappingSource
from weightlift.testing.pair import pair
from weightlift.transports.views import lend
from weightlift.verify.digests import Algorithm, Probe, Probes, Scope, digests

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

ALGORITHMS: list[Algorithm] = ["xxh3", "lanes"]
SCOPES: list[Scope] = ["sample", "full"]
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int64,
    torch.float8_e4m3fn,
    torch.complex64,
]


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    raw = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (3, 5), (1025, 1031), (3, 1 << 20)], ids=str)
def test_the_digest_is_the_same_on_host_and_device(
    algorithm: Algorithm, scope: Scope, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    host = numbers(*shape, dtype=dtype)
    device = host.cuda()
    strided = device.t().contiguous().t() if len(shape) == 2 else device
    expected = digests([Probe(host, dtype)], algorithm, scope, 3)
    assert digests([Probe(device, dtype)], algorithm, scope, 3) == expected
    assert digests([Probe(strided, dtype)], algorithm, scope, 3) == expected


def test_the_cast_on_the_device_is_the_cast_on_the_host() -> None:
    host = torch.linspace(-1000, 1000, 1 << 18)
    for held in (torch.bfloat16, torch.float16):
        one = digests([Probe(host, held)], "lanes", "full", 0)
        assert (
            digests([Probe(host.cuda(), held)], "lanes", "full", 0)
            == one
            == digests([Probe(host.to(held), held)], "lanes", "full", 0)
        )


def weights(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(999, 64).bfloat16().to(device),
        "q": torch.randn(40, 300).to(device).t(),
        "steps": torch.arange(5).to(device),
    }


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
@pytest.mark.parametrize("verify", ["sample", "full"])
def test_a_sync_between_devices_is_verified(source: str, engine: str, verify: str) -> None:
    sent = weights(source)
    held = {name: torch.zeros_like(t, device=engine) for name, t in sent.items()}
    with pair(MappingSource(sent), MappingLoader(held), verify=verify, slot_bytes=1 << 16) as ends:
        for version in (1, 2):
            sent["embed"] += 1
            ends.sync(version).raise_any()
            assert all(torch.equal(held[name].cpu(), sent[name].cpu()) for name in sent)


class Corrupting(MappingLoader):
    def finish(self) -> None:
        super().finish()
        self._targets["q"][0][270, 38] = 77.0


@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_a_difference_is_named_with_both_values(engine: str) -> None:
    sent = weights("cuda")
    held = {name: torch.zeros_like(t, device=engine) for name, t in sent.items()}
    with pair(MappingSource(sent), Corrupting(held), verify="full") as ends:
        error = ends.sync(1).error
    assert isinstance(error, DigestMismatch)
    assert f"q[270, 38] is {sent['q'][270, 38].item()} in the trainer and 77.0 in engine" in error.message


def test_device_memory_that_is_kept_is_seen() -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    kept: list[torch.Tensor] = []
    with pytest.raises(LoaderError, match="kept a view"):
        lend(memory, lambda lent: kept.append(lent[8:].view(torch.int64)))
    kept.clear()
    lend(memory, lambda lent: kept.append(lent.clone()))


def test_how_fast_it_is() -> None:
    """No limit is asserted: the numbers go to WEIGHTLIFT_GPU_OUT."""
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, tensors in {
        "1.1 GiB in 310": [torch.randn(1_900_000, device="cuda").bfloat16() for _ in range(310)],
        "1.1 GiB in 4632": [torch.randn(127_000, device="cuda").bfloat16() for _ in range(4632)],
    }.items():
        probes = Probes([Probe(tensor, tensor.dtype) for tensor in tensors])
        for scope in SCOPES:
            seconds = []
            for version in range(6):
                torch.cuda.synchronize()
                start = time.perf_counter()
                last = probes.digests("lanes", scope, version)
                seconds.append(time.perf_counter() - start)
            assert last == probes.digests("lanes", scope, version), "the same tensors and version give the same digests"
            found[f"{name}, {scope}, ms"] = round(1000 * sorted(seconds[1:])[2], 2)
    out = os.environ.get("WEIGHTLIFT_GPU_OUT")
    if out:
        pathlib.Path(out).write_text(json.dumps(found, indent=2))
