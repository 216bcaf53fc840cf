"""Write tests/support/data/nccl_abi.json: the exported symbols of each NCCL release and the layout of its nccl.h.

All facts come from the C compiler and nm, not from parsing the header: names from the compiler's debug information,
numbers from a small C program, prototypes from -aux-info. Needs gcc and binutils, but not CUDA's headers or a driver.

Each release is written as an RFC 7396 merge patch of the previous one, so that a new release is a short diff. `expand`
restores the full data:
    code        NCCL_VERSION_CODE
    symbols     exported ncclXxx -> whether its profiling variant pncclXxx is also exported
    prototypes  ncclXxx declared by nccl.h -> its type
    structs     type -> size and, for each field, [offset, size], in bytes
    enums       enumerator -> value

examples:
  python scripts/dump_nccl_abi.py --out abi.json $(python -c "import nvidia.nccl as n; print(n.__path__[0])")/../..
  python scripts/dump_nccl_abi.py                        # long: downloads all versions by pip (3 GB)
  python scripts/dump_nccl_abi.py 2.21.5 --out abi.json  # long: downloads one
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pynccl import progress
from pynccl.bindings.abi import version_tuple
from pynccl.tools import command

# The last patch release of each minor version, 2.18 to 2.32.
VERSIONS = (
    "2.18.3", "2.19.3", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1",
    "2.26.5", "2.27.7", "2.28.9", "2.29.7", "2.30.7", "2.31.2", "2.32.3",
)  # fmt: skip
OUT = Path(__file__).parent.parent / "tests" / "support" / "data" / "nccl_abi.json"

# The parts of CUDA's headers that nccl.h and nccl_device/host.h need, so that no CUDA toolkit is required.
CUDA_HEADERS = {
    "cuda_runtime.h": "#pragma once\n#include <stddef.h>\n#define CUDART_VERSION 12000\n"
    "typedef struct CUstream_st *cudaStream_t;\ntypedef struct CUevent_st *cudaEvent_t;\n",
    "cuda.h": "#pragma once\ntypedef enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
}

Abi = dict[str, Any]


def write_cuda_headers(folder: Path) -> Path:
    """Write stubs of CUDA's headers to `folder` and return it."""
    for name, text in CUDA_HEADERS.items():
        (folder / name).write_text(text)
    return folder


class Header:
    """A header of a release, examined with the compiler. `folder` receives the compiled files."""

    def __init__(self, include: Path, folder: Path, name: str = "nccl.h") -> None:
        self.folder = write_cuda_headers(folder)
        self.source = f"#include <{name}>\n#include <stdio.h>\n"
        # NCCL's own build defines NCCL_OS_LINUX: nccl.h declares ncclResetDebugInit only with it.
        self.options = [f"-I{folder}", "-isystem", str(include), "-DNCCL_OS_LINUX"]

    def compile(self, *options: str, source: str = "") -> Path:
        """Compile the header followed by `source` and return the output file."""
        source_file, target = self.folder / "probe.c", self.folder / "probe.out"
        source_file.write_text(self.source + source)
        run("gcc", *self.options, *options, str(source_file), "-o", str(target))
        return target

    def prototypes(self) -> dict[str, str]:
        """Return name -> "result (arguments)" of each ncclXxx that the header declares but does not define."""
        listing = self.folder / "prototypes"
        self.compile("-c", "-aux-info", str(listing))
        found, defined = {}, set()
        for line in listing.read_text().splitlines():
            match = re.match(r"/\* .*:\w([CF]) \*/ extern (.*?[ *])(nccl[A-Z]\w*) (\(.*?\));", line)
            if match:
                kind, result, name, arguments = match.groups()
                arguments = arguments.replace(" ,", ",").replace("/* ??? */", "")  # how gcc prints an empty ()
                found[name] = f"{result.strip()} {arguments}"
                defined |= {name} if kind == "F" else set()
        return {name: found[name] for name in sorted(found.keys() - defined)}

    def layout(self) -> Abi:
        """Return NCCL_VERSION_CODE, structs and enums."""
        structs, enums = self._names()
        expressions = ["NCCL_VERSION_CODE", *enums]
        for struct, fields in structs.items():
            expressions.append(f"sizeof({struct})")
            for field in fields:
                expressions += [f"__builtin_offsetof({struct}, {field})", f"sizeof((({struct} *)0)->{field})"]
        values = iter(self._evaluate(expressions))
        return {
            "code": next(values),
            "enums": {name: next(values) for name in enums},
            "structs": {
                struct: {"size": next(values), "fields": {field: [next(values), next(values)] for field in fields}}
                for struct, fields in structs.items()
            },
        }

    def _evaluate(self, expressions: list[str]) -> list[int]:
        """Return the values of C integer expressions."""
        prints = "".join(f'  printf("%lld\\n", (long long)({expression}));\n' for expression in expressions)
        program = self.compile(source=f"int main(void) {{\n{prints}  return 0;\n}}\n")
        return [int(line) for line in run(str(program)).split()]

    def _names(self) -> tuple[dict[str, list[str]], list[str]]:
        """Return (struct type -> its fields, enumerators) of the header, from the debug information."""
        entries = debug_entries(self.compile("-c", "-g", "-gdwarf-4", "-fno-eliminate-unused-debug-types"))
        by_offset = {entry["offset"]: entry for entry in entries}
        structs = {}
        for entry in entries:
            if entry["tag"] == "typedef" and entry["DW_AT_name"].startswith("nccl"):
                target = by_offset[entry["DW_AT_type"].strip("<>").removeprefix("0x")]
                if target["tag"] == "structure_type":
                    structs[entry["DW_AT_name"]] = [child["DW_AT_name"] for child in target["children"]]
        enums = [entry["DW_AT_name"] for entry in entries if entry["tag"] == "enumerator"]
        return dict(sorted(structs.items())), [name for name in enums if name.upper().startswith("NCCL")]


def debug_entries(binary: Path) -> list[dict[str, Any]]:
    """Return the DWARF entries of an object file, each with its offset, tag, attributes and children."""
    entries: list[dict[str, Any]] = []
    parents: list[dict[str, Any]] = []
    for line in run("readelf", "--debug-dump=info", str(binary)).splitlines():
        if match := re.match(r" <(\d+)><(\w+)>: Abbrev Number: \d+ \(DW_TAG_(\w+)\)", line):
            depth = int(match[1])
            entries.append({"offset": match[2], "tag": match[3], "children": []})
            parents[depth:] = [entries[-1]]
            if depth:
                parents[depth - 1]["children"].append(entries[-1])
        elif entries and (match := re.match(r"    <\w+> +(DW_AT_\w+) *: (?:\(.*?\): )?(.*)", line)):
            entries[-1][match[1]] = match[2].strip()
    return entries


def exported(library: Path) -> dict[str, bool]:
    """Return ncclXxx exported by `library` -> whether pncclXxx is, too. `library` can be a text file of names."""
    text = library.read_text() if library.suffix == ".txt" else run("nm", "-D", "--defined-only", str(library))
    names = {line.split()[-1].partition("@")[0] for line in text.splitlines() if line.strip()}
    return {name: f"p{name}" in names for name in sorted(names) if re.match(r"nccl[A-Z]\w*$", name)}


def snapshot(root: Path) -> Abi:
    """Return all data of the release whose wheel is unpacked in `root`."""
    package = root / "nvidia" / "nccl"
    libraries = [*package.glob("lib/libnccl.so*"), root / "symbols.txt"]
    with tempfile.TemporaryDirectory() as folder:
        header = Header(package / "include", Path(folder))
        return {
            **header.layout(),
            "symbols": exported(next((path for path in libraries if path.exists()), libraries[0])),
            "prototypes": header.prototypes(),
        }


def unpacked(source: str, cache: Path) -> Path:
    """Return the folder of a release. `source` is the folder, or a version that pip unpacks in `cache` if needed."""
    if re.fullmatch(r"\d+(\.\d+)+", source):
        root = cache / source
        if not root.exists():
            requirement = f"nvidia-nccl-cu12=={source}"
            run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(root), requirement)
        return root
    if not Path(source, "nvidia", "nccl", "include", "nccl.h").exists():
        raise ValueError(
            f"{source}: expected a version such as 2.21.5, or an unpacked wheel with nvidia/nccl/include/nccl.h"
        )
    return Path(source)


def patch(old: Any, new: Any) -> Any:
    """Return the RFC 7396 merge patch from `old` to `new`."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    changed = {key: patch(old.get(key), value) for key, value in new.items() if old.get(key) != value}
    return {**changed, **{key: None for key in old if key not in new}}


def merge(old: Any, change: Any) -> Any:
    """Return `old` with the merge patch `change` applied."""
    if not isinstance(change, dict):
        return change
    old = old if isinstance(old, dict) else {}
    merged = {**old, **{key: merge(old.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def expand(patches: dict[str, Abi]) -> dict[str, Abi]:
    """Return version -> full data, from the patches that this script writes."""
    full: dict[str, Abi] = {}
    last: Abi = {}
    for version, change in patches.items():
        full[version] = last = merge(last, change)
    return full


def compact(data: Any) -> str:
    """Return JSON with one fact per line."""
    return re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(data, indent=1)) + "\n"


def run(*words: str) -> str:
    """Return the output of a command. Raises FailedError with its stderr if it fails."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise command.FailedError(f"{' '.join(words)} failed:\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = command.Parser(__doc__, failed="pip found no such version")
    parser.add_argument("sources", nargs="*", default=VERSIONS, help="versions, or folders of unpacked wheels")
    parser.add_argument("--cache", type=Path, default=Path("build/wheels"), help="folder for downloaded releases")
    parser.add_argument("--out", type=command.output_file, default=str(OUT), help="output file (default: test data)")
    options = parser.parse_args()
    found: dict[str, Abi] = {}
    for source in progress.over(options.sources, "reading", "release"):
        release = snapshot(unpacked(source, options.cache))
        version = ".".join(map(str, version_tuple(release["code"])))
        found[version] = release
        print(f"{version}: {len(release['symbols'])} symbols, {len(release['prototypes'])} in nccl.h", flush=True)
    ordered = [found[version] for version in sorted(found, key=lambda version: found[version]["code"])]
    names = [".".join(map(str, version_tuple(release["code"]))) for release in ordered]
    patches = [patch(old, new) for old, new in zip([{}, *ordered], ordered, strict=False)]
    options.out.write_text(compact(dict(zip(names, patches, strict=True))))


if __name__ == "__main__":
    command.run(main)
