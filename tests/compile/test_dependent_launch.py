"""Dependent launch in the compiled code: what a kernel does before it waits for the launch before it.

The compiler may take loads through `const __restrict__` for loads of constants and move them over the wait.
So this is read from PTX, on every path to every instruction, and not from the source. The assembler behind
PTX could move them too; that takes a disassembler to see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from cuda.bindings import nvrtc

from kernels import registry
from kernels.compiler import SOURCE_FOLDER, CompileUnit, include_folders

EARLY = {
    "add_rms_norm": {"weight", "delta_weight_scale"},
    "gated_activation": {"weight_scale"},
    "gated_activation_fp8": {"weight_scale"},
    "rope_and_quantise": {"bias", "weight_scale", "q_norm", "k_norm"},
    "attention_step": {
        "bias", "weight_scale", "q_norm", "k_norm", "cosines", "sines", "row_slot", "slot_position",
        "slot_active", "block_table", "k_pages", "v_pages", "k_scales", "v_scales",
    },
    "attention_decode": {"block_table", "splits", "n_splits", "k_pages", "v_pages"},
    "q4_gemm": {"quants", "scales"},
    "q4_dequantise": {"quants", "scales"},
    "skinny_product": {"weights", "scales", "gains"},
    "skinny_stream": {"quants", "scales", "gains"},
    "skinny_rows": {"weights"},
}  # fmt: skip
"""Parameters that a kernel may read before it waits: what the launch right before cannot have written."""

_REGISTER = re.compile(r"%[a-z]+\d+")
_READS = re.compile(r"(?:ld\.(?:volatile\.)?global|cp\.async\.|prefetch\.global)")
_WRITES = re.compile(r"(?:st\.(?:volatile\.)?global|red\.|atom\.)")


@dataclass
class Instruction:
    text: str
    next: list[int] = field(default_factory=list)
    """What may come after it."""

    @property
    def operation(self) -> str:
        return re.sub(r"^@!?%?\w+\s+", "", self.text)


def units() -> list[CompileUnit]:
    """One or two of each source: the first and the last, of which variants differ most."""
    by_source: dict[str, list[CompileUnit]] = {}
    for unit in registry.all_units():
        by_source.setdefault(unit.source, []).append(unit)
    return [unit for same in by_source.values() for unit in dict.fromkeys((same[0], same[-1]))]


def ptx_of(unit: CompileUnit, arch: str) -> str:
    _, program = nvrtc.nvrtcCreateProgram(
        (SOURCE_FOLDER / unit.source).read_bytes(), unit.source.encode(), 0, [], []
    )
    for expression in unit.expressions:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
    options = [f"--gpu-architecture={arch}", "-std=c++17", "-default-device", "--no-cache", *unit.options]
    options += [f"-I{folder}" for folder in include_folders()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(text).decode().rstrip("\0")


def kernels_of(ptx: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(mangled name, its instructions in their order)."""
    for kernel in re.split(r"\.entry ", ptx)[1:]:
        name, _, rest = kernel.partition("(")
        yield name, instructions_of(rest[rest.index("\n{\n") + 3 : rest.rindex("\n}")])


def instructions_of(body: str) -> list[Instruction]:
    """Labels of inline assembly are the same in each of its blocks, so each block has its own."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    scope, depth = 0, 0
    for line in re.split(r"[;\n]", re.sub(r"//.*", "", body)):
        text = line.strip()
        if text.startswith("{"):
            scope, depth, text = scope + 1, depth + 1, text[1:].strip()
        if text == "}":
            depth -= 1  # of inline assembly: the kernel's own braces are cut off
            continue
        local = f"#{scope}" if depth else ""
        if label := re.fullmatch(r"([\w$]+):", text):
            labels[label[1] + ("" if label[1].startswith("$") else local)] = len(instructions)
        elif text and not text.startswith("."):
            if (jump := re.search(r"\bbra(?:\.uni)?\s+([\w$]+)", text)) and not jump[1].startswith("$"):
                text = f"{text[: jump.start(1)]}{jump[1]}{local}"
            instructions.append(Instruction(text))
    for index, instruction in enumerate(instructions):
        operation = instruction.operation
        if jump := re.match(r"bra(?:\.uni)?\s+([\w$#]+)", operation):
            instruction.next.append(labels[jump[1]])
        ends = operation.startswith(("ret", "bra", "exit")) and not instruction.text.startswith("@")
        if not ends and index + 1 < len(instructions):
            instruction.next.append(index + 1)
    return instructions


def before_the_wait(instructions: list[Instruction]) -> list[Instruction]:
    """Those that some path reaches without a wait."""
    reached, ahead = set(), [0]
    while ahead:
        index = ahead.pop()
        if index in reached:
            continue
        reached.add(index)
        if not instructions[index].operation.startswith("griddepcontrol.wait"):
            ahead += instructions[index].next
    return [instructions[index] for index in sorted(reached)]


def origins(instructions: list[Instruction]) -> dict[str, set[int]]:
    """The pointer parameters, by number, that each register is computed from; what is loaded has none."""
    found: dict[str, set[int]] = {}
    grown = True
    while grown:
        grown = False
        for instruction in instructions:
            operation, _, rest = instruction.operation.partition(" ")
            operands = rest.split(",", 1)
            if parameter := re.match(r"ld\.param\S*64", operation) and re.search(r"_param_(\d+)", rest):
                sources = {int(parameter[1])}
            elif operation.startswith(("ld.", "setp", "st.")) or len(operands) < 2:
                continue
            else:
                sources = set().union(*(found.get(name, set()) for name in _REGISTER.findall(operands[1])))
            for target in _REGISTER.findall(operands[0]):
                if not sources <= found.setdefault(target, set()):
                    found[target] |= sources
                    grown = True
    return found


def parameters_of(source: str, kernel: str) -> list[str]:
    signature = re.search(
        rf"\b{kernel}\(((?:const|bf16|\w+ )[^)]*)\)\s*\{{", (SOURCE_FOLDER / source).read_text()
    )
    assert signature is not None, f"{source} has no {kernel}"
    return [re.findall(r"\w+", parameter)[-1] for parameter in signature[1].split(",")]


def kernel_named(source: str, mangled: str) -> str:
    names = re.findall(r"\b(\w+)\((?:const|bf16|\w+ \w+)[^;{]*?\)\s*\{", (SOURCE_FOLDER / source).read_text())
    return str(max((name for name in names if name in mangled), key=len))


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_what_comes_before_the_wait(unit: CompileUnit) -> None:
    for mangled, instructions in kernels_of(ptx_of(unit, "compute_90a")):
        kernel = kernel_named(unit.source, mangled)
        names = parameters_of(unit.source, kernel)
        pointers = origins(instructions)
        assert any(i.operation.startswith("griddepcontrol.wait") for i in instructions), kernel
        for instruction in before_the_wait(instructions):
            operation = instruction.operation
            assert not operation.startswith("griddepcontrol.launch"), f"{kernel} lets the next in too early"
            assert not _WRITES.match(operation), f"{kernel} writes too early: {operation}"
            if _READS.match(operation) and not operation.startswith(("cp.async.wait", "cp.async.commit")):
                read = {names[p] for r in _REGISTER.findall(operation) for p in pointers.get(r, ())}
                assert read <= EARLY.get(kernel, set()), f"{kernel} reads {read} too early: {operation}"
