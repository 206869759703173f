# SPDX-License-Identifier: Apache-2.0
"""`dsd documents`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, word
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.paths import data_directory
from dsd_ros.shown import LINES, shown

if TYPE_CHECKING:
    from dsd_ros.cli.terminal import Progress
    from dsd_ros.dragon.documents.store import Store

command = App(name="documents", help="The documents that questions are answered from: add, list, search, remove.")


def _store() -> Any:
    return file_option(
        "folder of the store (default: $XDG_DATA_HOME/dsd_ros/documents, or below ~/.local/share)", "DIR"
    )


@arguments
class StoreArguments:
    store: Path | None = _store()
    json: Path | None = json_option("the answer")


@arguments
class AddArguments:
    paths: list[Path] = word(text="file, .md, .txt, .pdf, .docx or .html, or folder of such files", metavar="PATH")
    store: Path | None = _store()
    json: Path | None = json_option("the answer")


@arguments
class SearchArguments:
    query: str = word(text="a question, or some words")
    count: int = flag(5, "how many chunks to show")
    store: Path | None = _store()
    json: Path | None = json_option("the answer")


@arguments
class RemoveArguments:
    sources: list[str] = word(text="its name as 'list' shows it, or its file", metavar="SOURCE")
    store: Path | None = _store()
    json: Path | None = json_option("the answer")


def _folder(args: StoreArguments | AddArguments | SearchArguments | RemoveArguments) -> Path:
    return args.store or data_directory() / "documents"


@contextmanager
def _open(args: AddArguments | SearchArguments) -> Iterator[tuple[Store, Progress]]:
    from dsd_ros.cli.terminal import Progress
    from dsd_ros.dragon.documents.embedding import SentenceEncoder  # imports torch
    from dsd_ros.dragon.documents.store import Store

    with Progress() as progress:
        progress.to(0.0, "loading the embedding model")
        with Store(_folder(args), SentenceEncoder()) as store:
            yield store, progress


@command.command
def add(args: AddArguments) -> int:
    """Add files, update those that changed, remove what is gone from a folder; exit with 1 if one cannot be used."""
    from dsd_ros.dragon.documents.chunking import files_in, read_documents

    files, refused = files_in(args.paths), list[str]()
    documents = read_documents(files, refused.append)
    if len(files) == len(refused) == 1:
        raise ValueError(refused[0])
    added = []
    with _open(args) as (store, progress):
        for sentence in refused:
            progress.say(f"refused   {shown(sentence)}")
        for done, document in enumerate(documents):

            def report(share: float, line: str, done: int = done) -> None:
                progress.to((done + share) / len(documents), line)

            changed = store.add(document, report)
            added.append({"source": document.source, "changed": changed})
            progress.say(f"{'added    ' if changed else 'unchanged'} {shown(document.source)}")
        folders = [path.absolute() for path in args.paths if path.is_dir()]
        sources = [Path(listed.source) for listed in store.documents()]
        gone = [path for path in sources if any(map(path.is_relative_to, folders)) and not path.exists()]
        for path in gone:
            store.remove(str(path))
            progress.say(f"removed   {shown(str(path))}")
        chunks = len(store)
    print(f"{chunks} chunks in all")
    write_json(args.json, {"documents": added, "removed": list(map(str, gone)), "refused": refused, "chunks": chunks})
    return EXIT_GOAL_MISSED if refused else EXIT_DONE


@command.command(name="list")
def list_(args: StoreArguments = StoreArguments()) -> int:
    """List the documents."""
    from dsd_ros.dragon.documents.store import Store

    with Store(_folder(args), encoder=None) as store:
        listed, chunks = store.documents(), len(store)
    for each in listed:
        print(shown(f"{each.chunks:6} {each.source}"))
    print(f"{len(listed)} documents, {chunks} chunks")
    write_json(args.json, {"documents": [each._asdict() for each in listed], "chunks": chunks})
    return EXIT_DONE


@command.command
def search(args: SearchArguments) -> int:
    """Show what is found for a question."""
    with _open(args) as (store, _):
        found = store.search(args.query, args.count)
    for each in found:
        place = each.source + (f" ({each.heading})" if each.heading else "")
        print(f"{each.cosine:.3f}  {shown(each.text, keep=LINES)}\n       {shown(place)}")
    if not found:
        print("there are no documents; add some with 'dsd documents add'")
    write_json(args.json, {"found": [each._asdict() | {"relevance": each.relevance} for each in found]})
    return EXIT_DONE


@command.command
def remove(args: RemoveArguments) -> int:
    """Remove documents; exit with 1 if one is not in the store."""
    from dsd_ros.dragon.documents.store import Store

    missing = []
    with Store(_folder(args), encoder=None) as store:
        for source in args.sources:
            if store.remove(source) or store.remove(str(Path(source).absolute())):
                print(f"removed {shown(source)}")
            else:
                missing.append(source)
                print(f"not there: {shown(source)}")
    write_json(args.json, {"missing": missing})
    return EXIT_GOAL_MISSED if missing else EXIT_DONE
