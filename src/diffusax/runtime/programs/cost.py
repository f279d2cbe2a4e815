"""What compiled programs take on each device, and of which kernels those for GPUs are made.

XLA's cost analysis says nothing for GPUs, but the compiled module lists every kernel, call of a
library and collective in the order in which they run.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from diffusax.runtime.devices.chips import Chip

_FREE = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
    ]
)
"""Instructions that launch nothing."""
_SLICES = frozenset(["slice", "dynamic-slice", "gather"])
_BYTES = {"pred": 1, "token": 0}
_INSTRUCTION = re.compile(
    r"\s+(ROOT )?%?([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\((.*)"
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_WORKSPACE = re.compile(r", (?:/\*index=\d+\*/)?[su]8\[\d+\](?:\{[^}]*\})?\)$")
"""The last result of a call of cuBLAS or cuDNN, which is no result."""
_TIME = re.compile(r'"exec_time_us":([\d.e+-]+)')


class Cost(NamedTuple):
    """What a compiled program takes on each device. A loop counts once, however often it runs."""

    tflop: float
    """The number of floating-point operations in 10^12."""
    moved: float
    """The GB read from and written to the device's memory."""
    arguments: float
    """The GB of arguments, which include the parameters."""
    temporaries: float
    """The GB besides arguments and results while it runs."""
    code: float
    """The GB of the program itself."""
    peak: float
    """The GB of arguments, results, temporaries and code together."""
    kernels: int | None = None
    """On GPUs the number of kernels and calls of libraries."""
    host: float = 0.0
    """The GB of arguments in the host's memory, which a loop copies in each of its rounds."""

    @property
    def results(self) -> float:
        """The GB of results that do not take the place of arguments."""
        return self.peak - self.arguments - self.temporaries - self.code

    def fits(self, chip: Chip) -> bool:
        """Returns whether the peak is within what programs can have (`Chip.usable`)."""
        return self.peak <= chip.usable

    def seconds(self, chip: Chip) -> float:
        """Returns the least time that the chip needs: to compute or to move, the longer of the
        two.
        """
        return max(self.tflop / chip.tflops, self.moved / chip.bandwidth)

    def figures(self, chip: Chip | None) -> dict[str, float]:
        """Returns all by name, with whether it fits and the seconds where the chip is known."""
        names = ("arguments", "results", "temporaries", "code", "peak", "moved", "tflop")
        found: dict[str, float] = {name: getattr(self, name) for name in names}
        if self.kernels is not None:
            found["kernels"] = self.kernels
        if self.host:
            found["host"] = self.host
        if chip is not None:
            found |= {"seconds": self.seconds(chip), "fits": self.fits(chip)}
        return found


def cost_of(compiled: jax.stages.Compiled, *, needed: float = 0.0) -> Cost:
    """Returns what XLA says of an executable; memory that it does not tell counts as 0.

    needed: the operations that are needed on each device (see `flops`). They count
    where XLA gives no number, as for GPUs that are elsewhere; then the kernels and the bytes are
    counted in the executable's text.
    """
    analysis: Any = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()

    def gigabytes(name: str) -> float:
        return getattr(memory, f"{name}_size_in_bytes", 0) / 1e9

    arguments, temporaries = gigabytes("argument"), gigabytes("temp")
    results = gigabytes("output") - gigabytes("alias")
    code = gigabytes("generated_code")
    operations, moved = analysis.get("flops", 0), analysis.get("bytes accessed", 0) / 1e9
    kernels = None
    if needed and not operations:
        found = traffic(kernels_of(compiled.as_text() or ""))
        operations, moved, kernels = needed, found.moved, found.kernels
    return Cost(
        operations / 1e12,
        moved,
        arguments,
        temporaries,
        code,
        arguments + results + temporaries + code,
        kernels,
        gigabytes("host_argument"),
    )


class Kernel(NamedTuple):
    """A kernel, or the call of a library's function or of a collective."""

    kind: str
    """XLA's name without its number, or the library's function."""
    read: int
    """The bytes of its inputs, once; of what is only sliced, the slices."""
    written: int
    """The bytes of its results, without a library's workspace."""
    times: int
    """How often it runs in a call, where a loop without a known end counts once."""
    in_step: bool
    """Whether it is in a loop without a known end, as a sampler's steps are."""
    source: str
    """The JAX operation that it comes from."""
    estimate: float | None
    """XLA's own estimate of its seconds, of modules that were compiled with
    xla_gpu_collect_cost_model_stats. Calls of libraries have none; nor have products here, whose
    tilings are chosen by timing them on a device.
    """

    @property
    def copies_weights(self) -> bool:
        """Whether it only changes the layout of something, before the steps."""
        return not self.in_step and ("transpose" in self.kind or "copy" in self.kind)


class Traffic(NamedTuple):
    """What some kernels do, together."""

    kernels: int
    """The number of launches."""
    moved: float
    """The GB read and written."""
    estimate: float
    """XLA's estimate in seconds of those that have one."""


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    arguments: str
    """What stands in its parentheses."""
    operands: Sequence[str]
    """The instructions among its arguments."""
    rest: str
    """What follows: attributes and metadata."""
    root: bool


_Computations = Mapping[str, Sequence[_Instruction]]


def kernels_of(text: str) -> list[Kernel]:
    """Lists the kernels of a compiled module.

    text: `jax.stages.Compiled.as_text()`.
    """
    computations, entry = _parse(text)
    return list(_walk(computations, entry, 1, in_step=False))


def traffic(kernels: Sequence[Kernel]) -> Traffic:
    """Adds up kernels."""
    return Traffic(
        sum(k.times for k in kernels),
        sum(k.times * (k.read + k.written) for k in kernels) / 1e9,
        sum(k.times * (k.estimate or 0.0) for k in kernels),
    )


def _parse(text: str) -> tuple[_Computations, str]:
    """Returns the instructions of each computation, and the name of the first."""
    found: dict[str, list[_Instruction]] = {}
    entry, own = "", None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            own = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
            continue
        parts = _INSTRUCTION.match(line)
        if own is None or not parts:
            continue
        root, name, shape, opcode, rest = parts.groups()
        inside = _until_closed(rest)
        operands = re.findall(r"%([\w.\-]+)", inside)
        after = rest[len(inside) :]
        own.append(_Instruction(name, shape, opcode, inside, operands, after, bool(root)))
    return found, entry


def _until_closed(text: str) -> str:
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return text[: found.start()]
    return text


def _walk(computations: _Computations, name: str, times: int, *, in_step: bool) -> Iterator[Kernel]:
    """Lists the kernels of a computation, which runs so often."""
    own = computations[name]
    shapes = {one.name: one.shape for one in own}
    for one in own:
        called = _called(one, computations)
        if one.opcode in _FREE or one.opcode.endswith(("-done", "-update")):
            continue
        if one.opcode == "while":
            trips = _TRIPS.search(one.rest)
            n, loop = (int(trips[1]), in_step) if trips else (1, True)
            for inner in called:
                yield from _walk(computations, inner, times * n, in_step=loop)
        elif one.opcode == "conditional":
            branches = [list(_walk(computations, c, times, in_step=in_step)) for c in called]
            yield from max(branches, key=len)
        elif one.opcode in ("call", "async-start"):
            for inner in called:
                yield from _walk(computations, inner, times, in_step=in_step)
        else:
            body = computations[called[0]] if one.opcode == "fusion" else None
            yield _kernel(one, shapes, body, times, in_step=in_step)


def _called(one: _Instruction, computations: _Computations) -> list[str]:
    listed = re.findall(
        r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)",
        one.rest,
    )
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", one.rest):
        listed += re.findall(r"%?([\w.\-]+)", branches)
    return [name for name in listed if name in computations]


def _kernel(
    one: _Instruction,
    shapes: Mapping[str, str],
    body: Sequence[_Instruction] | None,
    times: int,
    *,
    in_step: bool,
) -> Kernel:
    target = re.search(r'custom_call_target="([^"]+)"', one.rest)
    source = re.search(r'op_name="([^"]*)"', one.rest)
    seconds = None if target or "kind=kCustom" in one.rest else _TIME.search(one.rest)
    kind = one.opcode
    if target:
        kind = target[1]
    elif body is not None:
        kind = re.sub(r"[.\d]+$", "", one.name)
    sizes = [bytes_of(shapes.get(name, "")) for name in one.operands]
    read, written = sum(sizes), bytes_of(_WORKSPACE.sub(")", one.shape) if target else one.shape)
    if body is not None:
        read, written = _fusion(body, sizes, written)
    elif one.opcode in _SLICES:
        read = written
    return Kernel(
        kind,
        read,
        written,
        times,
        in_step,
        source[1] if source else "",
        float(seconds[1]) / 1e6 if seconds else None,
    )


def _fusion(body: Sequence[_Instruction], sizes: Sequence[int], written: int) -> tuple[int, int]:
    """Returns what a fusion reads and writes, where inputs may be sliced or changed in place."""
    users: dict[str, list[_Instruction]] = {}
    for one in body:
        for operand in one.operands:
            users.setdefault(operand, []).append(one)
    read = 0.0
    for one in body:
        if one.opcode == "parameter":
            size, count = sizes[int(one.arguments)], _elements(one.shape)
            read += size * min(1.0, _elements_read(one, users) / max(count, 1))
    shapes = {one.name: one.shape for one in body}
    root = next(one for one in body if one.root)
    if root.opcode == "dynamic-update-slice":
        written = bytes_of(shapes[root.operands[1]])
    return round(read), written


def _elements_read(one: _Instruction, users: Mapping[str, Sequence[_Instruction]]) -> int:
    """Returns how many elements of an instruction's result the others of its fusion need."""
    total = 0
    for user in users.get(one.name, ()):
        first = user.operands[0] == one.name
        if user.opcode in _SLICES and first:
            total += _elements(user.shape)
        elif user.opcode in ("convert", "bitcast"):
            total += _elements_read(user, users)
        elif user.opcode != "dynamic-update-slice" or not first:
            return _elements(one.shape)
    return total


def _elements(shape: str) -> int:
    sizes = re.search(r"\[([\d,]*)\]", shape)
    return math.prod(int(n) for n in sizes[1].split(",") if n) if sizes else 0


def bytes_of(shape: str) -> int:
    """Returns the bytes of a shape in XLA's notation, such as bf16[2,64]{1,0}, or of a tuple."""
    total = 0
    for kind, sizes in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"(\d+)", kind)
        size = _BYTES.get(kind, int(bits[1]) / 8 if bits else 4)
        total += math.ceil(size * math.prod(int(n) for n in sizes.split(",") if n))
    return total
