# SPDX-License-Identifier: Apache-2.0
"""PDF, DOCX and HTML become documents; bad files are refused by name; a watched folder and its store are in step."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hashed_words import HashedWords

from dsd_ros.dragon.documents import chunking
from dsd_ros.dragon.documents.chunking import DocumentError, files_in, read_document, read_documents
from dsd_ros.dragon.documents.store import open_documents

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
BODY = (
    '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Chairs</w:t></w:r></w:p>'
    "<w:p><w:r><w:t>The Viola chair </w:t></w:r><w:r><w:t>is red.</w:t></w:r></w:p>"
    "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>The Bruno is blue.</w:t></w:r></w:p>"
    "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>Oskar</w:t></w:r></w:p></w:tc><w:tc><w:p><w:r><w:t>white</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
)


def write_docx(path: Path, body: str = BODY, before: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        content = f'<?xml version="1.0"?>{before}<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
        archive.writestr("word/document.xml", content)
    return path


def write_pdf(path: Path, *lines: str) -> Path:
    """A PDF of one page, written by hand."""
    shown = " ".join(f"({line}) Tj T*" for line in lines)
    stream = f"BT /F1 12 Tf 14 TL 50 700 Td {shown} ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        " /Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    content, places = "%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    content += (
        f"xref\n0 6\n0000000000 65535 f \n{table}trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
    )
    path.write_text(content)
    return path


def lock_pdf(path: Path) -> Path:
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter(clone_from=path)
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(path)
    return path


def chunks_of(path: Path) -> list[tuple[str, str]]:
    cut = chunking.chunks(read_document(path).text, lambda text: len(text.split()))
    return [(chunk.heading, chunk.text) for chunk in cut]


def test_a_word_document_keeps_its_headings_lists_and_tables(tmp_path: Path) -> None:
    found = chunks_of(write_docx(tmp_path / "chairs.docx"))
    assert found == [("Chairs", "The Viola chair is red. The Bruno is blue. Oskar, white.")]


def test_a_web_page_is_what_a_browser_shows(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = "<title>House</title><script>evil()</script><h2>Chairs</h2><p>The Viola&nbsp;chair\n is <b>r&eacute;d</b>."
    text += "<ul><li>One.</ul>"
    page.write_bytes(f'<meta charset="iso-8859-1">{text} \u00fc'.encode("iso-8859-1"))
    assert chunks_of(page) == [("Chairs", "The Viola chair is r\u00e9d. One. \u00fc")]


def test_a_pdf_is_read_and_its_hyphens_are_joined(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    document = read_document(write_pdf(tmp_path / "list.pdf", "The Viola chair stands in the gar-", "den."))
    assert " ".join(document.text.split()) == "The Viola chair stands in the garden."
    assert document.source == str(tmp_path / "list.pdf")


def bad_files(folder: Path) -> dict[str, str]:
    """Files that cannot be used, and what is said of them."""
    pytest.importorskip("pypdf")
    (folder / "noise.pdf").write_bytes(b"%PDF-1.7\n" + bytes(range(256)) * 8)
    (folder / "cut.docx").write_bytes(write_docx(folder / "cut.docx").read_bytes()[:200])
    (folder / "old.docx").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    lock_pdf(write_pdf(folder / "locked.pdf", "A secret."))
    write_pdf(folder / "picture.pdf")
    write_docx(folder / "bomb.docx", "<w:p><w:r><w:t>" + "a" * (65 << 20) + "</w:t></w:r></w:p>")
    laughs = "<!DOCTYPE x [<!ENTITY a 'ha'><!ENTITY b '&a;&a;&a;&a;'>]>"
    write_docx(folder / "laughs.docx", "<w:p><w:r><w:t>&b;</w:t></w:r></w:p>", laughs)
    (folder / "what.html").write_bytes(b"<meta charset=utf-8>\xff\xfe")
    with (folder / "huge.pdf").open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    return {
        "noise.pdf": "is damaged", "cut.docx": "is damaged", "old.docx": "is locked",
        "locked.pdf": "is locked by a password", "laughs.docx": "is not as a word processor",
        "picture.pdf": "holds no text", "bomb.docx": "unpacks to more than 64 MiB",
        "what.html": "is in no character set that it names", "huge.pdf": "is larger than 64 MiB; split it",
    }  # fmt: skip


def test_what_cannot_be_used_is_refused_by_name_and_the_rest_goes_on(tmp_path: Path, caplog) -> None:
    expected = bad_files(tmp_path)
    write_docx(tmp_path / "good.docx")
    refused: list[str] = []
    documents = read_documents(files_in([tmp_path]), refused=refused.append)
    assert [Path(document.source).name for document in documents] == ["good.docx"]
    assert len(refused) == len(expected)
    for name, said in expected.items():
        assert any(line.startswith(f"{tmp_path / name} {said}") for line in refused), (name, refused)
    with open_documents(tmp_path, HashedWords()) as store:
        assert len(store) == 1 and "locked.pdf is locked" in caplog.text


def test_a_reader_that_crashes_or_never_ends_costs_one_file(tmp_path: Path, monkeypatch) -> None:
    path = write_docx(tmp_path / "a.docx")
    program = tmp_path / "extraction.py"
    monkeypatch.setattr(chunking, "__file__", str(tmp_path / "chunking.py"))
    program.write_text("import os\nos.abort()\n")
    with pytest.raises(DocumentError, match=r"a\.docx crashes or takes too long"):
        read_document(path)
    program.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(chunking, "_EXTRACTING_S", 0.5)
    with pytest.raises(DocumentError, match=r"a\.docx takes more than 0\.5 s to read; split it"):
        read_document(path)
