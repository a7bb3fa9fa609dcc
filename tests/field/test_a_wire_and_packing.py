"""Field reports, group A: wire format and bucket packing. Numbers are those of docs/field-coverage.md."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weightlift import ConfigError
from weightlift.errors import DtypeMismatch, ShapeMismatch
from weightlift.loaders import MappingLoader
from weightlift.protocol.manifest import ITEM_BYTES
from weightlift.protocol.plan import Plan
from weightlift.sources import MappingSource, ModuleSource
from weightlift.sources.packing import Packer
from weightlift.tensors import torch_dtype
from weightlift.testing.contracts import same_bits
from weightlift.testing.pair import pair

pytestmark = pytest.mark.usefixtures("nothing_left")


def through(sent: dict[str, torch.Tensor], *, slot_bytes: int, slots: int = 2) -> tuple[dict[str, torch.Tensor], int]:
    """What an engine holds after two syncs over shared memory, and how many buckets one took."""
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in sent.items()}
    with pair(MappingSource(sent), MappingLoader(held), slot_bytes=slot_bytes, slots=slots) as ends:
        for version in (1, 2):
            report = ends.sync(version).raise_any().report
    assert report is not None
    return held, report.buckets


def assert_same(sent: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> None:
    assert [name for name in sent if not same_bits(sent[name], held[name])] == []


def test_b01_narrow_before_wide_in_one_byte_bucket() -> None:
    sent = {
        "a": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
        "b": torch.rand(2),
        "c": torch.tensor([7], dtype=torch.uint8),
        "d": torch.tensor([-5]),
        "e": torch.empty(0, 4, dtype=torch.bfloat16),
        "f": torch.rand(5),
    }
    held, buckets = through(sent, slot_bytes=64)
    assert_same(sent, held)
    assert buckets > 1
    plan = Plan(MappingSource(sent).manifest(), capacity=64)
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            assert piece.offset % ITEM_BYTES[plan.manifest.entries[piece.entry].dtype] == 0


def test_b02_strided_views() -> None:
    fused = torch.rand(6, 3)
    sent = {
        "t": torch.arange(6.0).view(2, 3).t(),
        "s": torch.rand(4, 6)[:, ::2],
        "x": torch.ones(1, 4).expand(3, 4),
        "n": torch.rand(8)[1::3],
        "q": fused[2:4],
        "flipped": torch.rand(5).flip(0),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    }
    held, _ = through(sent, slot_bytes=64)
    assert_same({name: tensor.resolve_conj().resolve_neg() for name, tensor in sent.items()}, held)
    assert all(tensor.is_contiguous() for tensor in held.values())


@pytest.mark.parametrize(
    "sizes",
    [(900, 2500, 1024, 1026, 4), (5000, 4), (4, 5000), (5000, 6000, 7000), (1024, 1024, 1024), (1023, 1, 1024)],
)
def test_b04_tensors_larger_than_the_bucket(sizes: tuple[int, ...]) -> None:
    sent = {f"t{i}": torch.randint(0, 255, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    held, buckets = through(sent, slot_bytes=1024)
    assert_same(sent, held)
    assert buckets <= -(-(sum(sizes) + 64 * len(sizes)) // 1024) + 1


def test_b04_memory_of_a_streamed_oversized_tensor_stays_one_bucket() -> None:
    source = MappingSource({"huge": torch.zeros(1 << 20, dtype=torch.uint8)})
    with pair(source, MappingLoader({"huge": torch.ones(1 << 20, dtype=torch.uint8)}), slot_bytes=4096, slots=2) as ends:
        report = ends.sync(1).raise_any().report
    assert report is not None
    assert report.host_bytes_peak == 2 * 4096


def test_b05_scalars() -> None:
    sent = {"s": torch.tensor(1.5, dtype=torch.bfloat16), "w": torch.rand(3), "t": torch.tensor(-0.0), "u": torch.tensor(2**40)}
    held, _ = through(sent, slot_bytes=64)
    assert_same(sent, held)
    for shape in ((4,), (1,)):
        with pair(MappingSource({"s": torch.tensor(1.0)}), MappingLoader({"s": torch.zeros(shape)})) as ends:
            outcome = ends.sync(1)
            assert type(outcome.error) is ShapeMismatch, "a scalar never broadcasts"
            assert type(outcome.failed["engine"]) is ShapeMismatch


def test_b06_zero_size_tensors_and_the_number_of_buckets() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    net.register_buffer("nothing", torch.zeros(0, 7))
    source = ModuleSource(net)
    held = {entry.name: torch.zeros(entry.shape) for entry in source.manifest().entries}
    with pair(source, MappingLoader(held), slot_bytes=40) as ends:
        report = ends.sync(1).raise_any().report
    assert report is not None
    assert report.buckets >= 3
    assert_same({name: tensor.detach() for name, tensor in net.state_dict().items()}, held)
    with pair(MappingSource({"w": torch.zeros(0)}), MappingLoader({"w": torch.zeros(1280)})) as ends:
        assert type(ends.sync(1).error) is ShapeMismatch, "a placeholder is not data"


@pytest.mark.parametrize("name", ["float32", "torch.float32", "fp32"])
def test_b08_dtype_names(name: str) -> None:
    assert torch_dtype(name) is torch.float32
    source = MappingSource({"w": torch.rand(8, dtype=torch.float64)}, dtype=name)
    assert source.manifest().entries[0].dtype == "float32"


def test_b08_a_declared_dtype_is_the_dtype_that_is_sent() -> None:
    sent, held = {"w": torch.rand(8)}, {"w": torch.zeros(8, dtype=torch.bfloat16)}
    with pair(MappingSource(sent), MappingLoader(held)) as ends:
        assert type(ends.sync(1).error) is DtypeMismatch
    assert not held["w"].any()
    with pair(MappingSource(sent, dtype="bf16"), MappingLoader(held)) as ends:
        ends.sync(1).raise_any()
    assert torch.equal(held["w"], sent["w"].bfloat16())
    with pair(
        MappingSource({"w": torch.full((2,), 300.0)}), MappingLoader({"w": torch.zeros(2, dtype=torch.int8)}, cast="float")
    ) as ends:
        assert type(ends.sync(1).error) is DtypeMismatch, "an integer is never cast to"
    with pytest.raises(ConfigError):
        MappingSource(sent, dtype="float33")


dtypes = st.sampled_from([torch_dtype(name) for name in ITEM_BYTES])


@st.composite
def odd_tensor(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and shape, with any strides that slicing, transposing and expanding make."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    dtype = draw(dtypes)
    raw = torch.randint(0, 255, (max(1, int(torch.tensor(shape).prod()) if shape else 1) * 2 * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    flat = raw.view(dtype)
    count = 1
    for size in shape:
        count *= size
    tensor = flat[::2][:count].view(dtype) if draw(st.booleans()) and count else flat[:count]
    tensor = tensor.reshape(shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.dim() >= 1 and tensor.shape[0] > 1 and draw(st.booleans()):
        tensor = tensor[1:]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@settings(max_examples=150, deadline=None)
@given(st.lists(odd_tensor(), min_size=1, max_size=6), st.integers(16, 400), st.integers(1, 3))
def test_a_whole_kind_any_tensors_through_any_slots(tensors: list[torch.Tensor], capacity: int, repeats: int) -> None:
    """Packer and loader against each other, without a transport: bits, shapes and dtypes survive any geometry."""
    sent = {f"t{i}": tensor for i, tensor in enumerate(tensors)}
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in sent.items()}
    source, loader = MappingSource(sent), MappingLoader(held)
    plan = Plan(source.manifest(), capacity=capacity)
    packer = Packer(source, plan)
    memory = [torch.empty(capacity, dtype=torch.uint8) for _ in range(2)]
    for _ in range(repeats):
        packer.begin()
        loader.prepare(plan)
        for bucket in plan.buckets:
            packer.fill(bucket.number, memory[bucket.number % 2])
            loader.install(bucket, memory[bucket.number % 2])
        loader.finish()
        assert_same(sent, held)
