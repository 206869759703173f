# SPDX-License-Identifier: Apache-2.0
"""`dsd documents`."""

from __future__ import annotations

import time
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
    place: str = flag("", "the place they are about (default: as they say)")
    time: str = flag("", "when they are from, e.g. 2026-11-22 (default: as they say)")
    store: Path | None = _store()
    json: Path | None = json_option("the answer")


@arguments
class WatchArguments:
    folder: Path = word(text="folder of such files", metavar="DIR")
    every: float = flag(2.0, "time between looks, s")
    once: bool = flag(False, "look once, and end")
    place: str = flag("", "the place they are about (default: as they say)")
    time: str = flag("", "when they are from, e.g. 2026-11-22 (default: as they say)")
    store: Path | None = _store()


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


@contextmanager
def _open(
    args: StoreArguments | AddArguments | WatchArguments | SearchArguments | RemoveArguments,
) -> Iterator[tuple[Store, Progress]]:
    from dsd_ros.cli.terminal import Progress
    from dsd_ros.dragon.documents.embedding import SentenceEncoder
    from dsd_ros.dragon.documents.store import Store

    folder = args.store or data_directory() / "documents"
    with Progress() as progress:
        progress.to(0.0, "loading the embedding model")
        encoder = SentenceEncoder()
        with Store(folder, encoder, progress=progress.to) as store:
            yield store, progress


@command.command
def add(args: AddArguments) -> int:
    """Add files, or update those that changed; exit with 1 if one cannot be used."""
    from dsd_ros.dragon.documents.chunking import files_in, read_documents

    files, refused = files_in(args.paths), list[str]()
    documents = read_documents(files, args.place, args.time, refused.append)
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
        chunks = len(store)
    print(f"{chunks} chunks in all")
    write_json(args.json, {"documents": added, "refused": refused, "chunks": chunks})
    return EXIT_GOAL_MISSED if refused else EXIT_DONE


@command.command
def watch(args: WatchArguments) -> int:
    """Keep the store in step with a folder: what is added, changed or deleted there. Ends with Ctrl-C."""
    from dsd_ros.dragon.documents.watching import FolderWatch

    with _open(args) as (store, progress):
        watched = FolderWatch(store, args.folder, args.place, args.time, settled_s=0.0 if args.once else 1.0)
        while True:
            for change in watched.sync(progress.to):
                about = change.reason or str(change.path)
                if change.kind != "unchanged":
                    progress.say(f"{change.kind:9} {shown(about)}")
            if args.once:
                return EXIT_DONE
            time.sleep(args.every)


@command.command(name="list")
def list_(args: StoreArguments = StoreArguments()) -> int:
    """List the documents."""
    with _open(args) as (store, _):
        listed, chunks = store.documents(), len(store)
    for each in listed:
        about = ", ".join(word for word in (each.place, each.time) if word)
        print(shown(f"{each.chunks:6} {each.source}{f'  ({about})' if about else ''}"))
    print(f"{len(listed)} documents, {chunks} chunks")
    keys = ("source", "place", "time", "chunks")
    rows = [{key: getattr(each, key) for key in keys} for each in listed]
    write_json(args.json, {"documents": rows, "chunks": chunks})
    return EXIT_DONE


@command.command
def search(args: SearchArguments) -> int:
    """Show what is found for a question."""
    with _open(args) as (store, _):
        found = store.search(args.query, args.count)
    for each in found:
        places = ", ".join(
            holder.source + (f" ({holder.heading})" if holder.heading else "") for holder in each.holders
        )
        print(f"{each.cosine:.3f}  {shown(each.text, keep=LINES)}\n       {shown(places)}")
    if not found:
        print("there are no documents; add some with 'dsd documents add'")
    rows = [
        {
            "key": each.key,
            "text": each.text,
            "cosine": each.cosine,
            "relevance": each.relevance,
            "documents": [holder._asdict() for holder in each.holders],
        }
        for each in found
    ]
    write_json(args.json, {"found": rows})
    return EXIT_DONE


@command.command
def remove(args: RemoveArguments) -> int:
    """Remove documents; exit with 1 if one is not in the store."""
    missing = []
    with _open(args) as (store, _):
        for source in args.sources:
            if store.remove(source) or store.remove(str(Path(source).absolute())):
                print(f"removed {shown(source)}")
            else:
                missing.append(source)
                print(f"not there: {shown(source)}")
    write_json(args.json, {"missing": missing})
    return EXIT_GOAL_MISSED if missing else EXIT_DONE


@command.command
def rebuild(args: StoreArguments = StoreArguments()) -> int:
    """Rebuild the index from the kept texts."""
    with _open(args) as (store, progress):
        store.rebuild(progress.to)
        chunks = len(store)
    print(f"{chunks} chunks, reindexed")
    write_json(args.json, {"chunks": chunks})
    return EXIT_DONE
