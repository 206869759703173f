# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab export`."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from dsd_ros.cli.arguments import arguments, file_option, flag, model_option, model_path
from dsd_ros.cli.shared import EXIT_DONE

command = App(name="export", help="Write models in other programs' formats.")


@arguments
class ExportGgufArguments:
    model: str = model_option("draft")
    folder: Path | None = file_option("folder for the two files (default: this one)", "DIR")
    type: str = flag("f16", "format of the matrices; norms and biases stay f32", choices=("f32", "f16", "q8_0"))


@command.command
def gguf(args: ExportGgufArguments = ExportGgufArguments()) -> int:
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL as llama.cpp reads it: MODEL.gguf and mmproj-MODEL.gguf.

    Token ids stay as they are, so that llama-server can draft with it (--draft-engine).
    """
    from dsd_lab.pair.export_gguf import export_gguf

    for path in export_gguf(model_path(args.model, "draft"), args.folder or Path(), args.type):
        print(path)
    return EXIT_DONE
