"""The command line of train.py, checked before anything starts."""

from __future__ import annotations

import argparse
import os

from train_data import SHIPPED, read_text
from train_model import ModelConfig
from train_report import TOLERANCE
from train_trace import add_options

from pynccl.bindings.library import gpu_count, gpu_problem
from pynccl.tools import command


def read_options(doc: str | None = None) -> argparse.Namespace:
    """The command line, with the text read; ends the process (2) if it cannot work, in the same words on every rank.

    doc       what the script does, and examples
    """
    parser = command.Parser(doc, failed="a rank failed, or --check found a difference")
    parser.add_argument("--steps", type=command.whole(1), default=100, help="steps of the optimizer (%(default)s)")
    parser.add_argument(
        "--device", help="cpu, cuda (a GPU per rank), cuda:0 (shared by all ranks); default: what is there"
    )
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32", help="of the weights (%(default)s)")
    parser.add_argument("--seed", type=command.whole(0), default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--layers", type=command.whole(1), default=ModelConfig.layers, help="blocks (%(default)s)")
    parser.add_argument(
        "--width", type=command.whole(1), default=ModelConfig.width, help="columns of the residual stream (%(default)s)"
    )
    parser.add_argument("--heads", type=command.whole(1), default=ModelConfig.heads, help="of attention (%(default)s)")
    parser.add_argument("--seq", type=command.whole(1), default=ModelConfig.seq, help="bytes in a window (%(default)s)")
    parser.add_argument("--batch", type=command.whole(1), default=8, help="windows in a step (%(default)s)")
    parser.add_argument("--lr", type=command.number(0), default=1e-3, help="learning rate of AdamW (%(default)s)")
    parser.add_argument("--data", metavar="FILE", help=f"text to learn; default: {SHIPPED}, which comes with Python")
    parser.add_argument("--out", default="out", help="folder for loss.png and checkpoint.pt (%(default)s)")
    parser.add_argument(
        "--overlap",
        choices=("auto", "off"),
        default="auto",
        help="hide communication behind matmuls: auto, where it pays, or off (%(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="train the unsharded model, too, and compare the losses")
    add_options(parser)
    options = parser.parse_args()
    ranks = os.environ.get("WORLD_SIZE", "1")
    config = ModelConfig(options.layers, options.width, options.heads, options.seq)
    if problem := config.problem(int(ranks) if ranks.isdigit() and int(ranks) else 1) or device_problem(options.device):
        parser.error(problem)
    if not options.lr:
        parser.error(f"--lr is {options.lr}, expected a number above 0")
    try:
        options.text = read_text(options.data, options.seq)
        command.output_folder(options.out)
    except ValueError as error:
        parser.error(str(error))
    except argparse.ArgumentTypeError as error:
        parser.error(f"--out {error}")
    return options


def device_problem(device: str | None) -> str:
    """Why --device cannot be used here; "" if it can."""
    kind, _, index = (device or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        return f"--device is {device!r}, expected cpu, cuda, or cuda:0"
    if kind == "cuda" and gpu_problem():
        return f"--device is {device}, but: {gpu_problem()}; use --device cpu"
    if index and int(index) >= gpu_count():
        return f"--device is {device}, but this machine has {gpu_count()} GPUs, numbered from 0"
    return ""
