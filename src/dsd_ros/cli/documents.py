"""`dsd documents`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, add_json, write_json
from dsd_ros.paths import data_directory

if TYPE_CHECKING:
    from dsd_ros.cli.terminal import Progress
    from dsd_ros.dragon.documents.store import Store

SUMMARY = "the documents that questions are answered from: add, list, search, remove"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    add = _action(actions, "add", "add text files, or take their changes over")
    add.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="file, .md or .txt, or folder of such")
    add.add_argument("--place", default="", help="where they are about (default: as they say)")
    add.add_argument("--time", default="", help="when they are from, e.g. 2026-11-22 (default: as they say)")
    add.set_defaults(run=_add)
    listed = _action(actions, "list", "list the documents")
    listed.set_defaults(run=_list)
    search = _action(actions, "search", "show what is found for a question")
    search.add_argument("query", metavar="QUERY", help="a question, or some words")
    search.add_argument("--count", type=int, default=5, metavar="N", help="chunks to show (default: %(default)s)")
    search.set_defaults(run=_search)
    remove = _action(actions, "remove", "forget documents; exit 1 where one is not there")
    remove.add_argument("sources", nargs="+", metavar="SOURCE", help="its name as 'list' says it, or its file")
    remove.set_defaults(run=_remove)
    rebuild = _action(actions, "rebuild", "make the index anew from the kept texts")
    rebuild.set_defaults(run=_rebuild)


def _action(actions: argparse._SubParsersAction, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="folder of the store (default: $XDG_DATA_HOME/dsd_ros/documents, or below ~/.local/share)",
    )
    add_json(parser, "the answer", alone=name in ("list", "rebuild"))
    return parser


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[tuple[Store, Progress]]:
    from dsd_ros.cli.terminal import Progress
    from dsd_ros.dragon.documents.embedding import SentenceEncoder
    from dsd_ros.dragon.documents.store import Store

    folder = data_directory() / "documents" if args.store is None else args.store
    with Progress() as progress:
        progress.to(0.0, "loading the embedding model")
        encoder = SentenceEncoder()
        with Store(folder, encoder, progress=progress.to) as store:
            yield store, progress


def _add(args: argparse.Namespace) -> int:
    from dsd_ros.dragon.documents.chunking import files_in, read_document

    documents = [read_document(path, args.place, args.time) for path in files_in(args.paths)]
    told = []
    with _open(args) as (store, progress):
        for done, document in enumerate(documents):

            def tell(share: float, line: str, done: int = done) -> None:
                progress.to((done + share) / len(documents), line)

            changed = store.add(document, tell)
            told.append({"source": document.source, "changed": changed})
            progress.say(f"{'added    ' if changed else 'unchanged'} {document.source}")
        chunks = len(store)
    print(f"{chunks} chunks in all")
    write_json(args.json, {"documents": told, "chunks": chunks})
    return EXIT_DONE


def _list(args: argparse.Namespace) -> int:
    with _open(args) as (store, _):
        listed, chunks = store.documents(), len(store)
    for each in listed:
        about = ", ".join(word for word in (each.place, each.time) if word)
        print(f"{each.chunks:6} {each.source}{f'  ({about})' if about else ''}")
    print(f"{len(listed)} documents, {chunks} chunks")
    keys = ("source", "place", "time", "chunks")
    rows = [{key: getattr(each, key) for key in keys} for each in listed]
    write_json(args.json, {"documents": rows, "chunks": chunks})
    return EXIT_DONE


def _search(args: argparse.Namespace) -> int:
    with _open(args) as (store, _):
        found = store.search(args.query, args.count)
    for each in found:
        places = ", ".join(
            holder.source + (f" ({holder.heading})" if holder.heading else "") for holder in each.hit.holders
        )
        print(f"{each.hit.cosine:.3f}  {each.hit.text}\n       {places}")
    if not found:
        print("there are no documents; add some with 'dsd documents add'")
    rows = [
        {
            "key": each.hit.key,
            "text": each.hit.text,
            "cosine": each.hit.cosine,
            "relevance": each.relevance,
            "documents": [holder._asdict() for holder in each.hit.holders],
        }
        for each in found
    ]
    write_json(args.json, {"found": rows})
    return EXIT_DONE


def _remove(args: argparse.Namespace) -> int:
    missing = []
    with _open(args) as (store, _):
        for source in args.sources:
            if store.remove(source) or store.remove(str(Path(source).absolute())):
                print(f"removed {source}")
            else:
                missing.append(source)
                print(f"not there: {source}")
    write_json(args.json, {"missing": missing})
    return EXIT_GOAL_MISSED if missing else EXIT_DONE


def _rebuild(args: argparse.Namespace) -> int:
    with _open(args) as (store, progress):
        store.rebuild(progress.to)
        chunks = len(store)
    print(f"{chunks} chunks, indexed anew")
    write_json(args.json, {"chunks": chunks})
    return EXIT_DONE
