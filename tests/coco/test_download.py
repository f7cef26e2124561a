"""Downloads from a server of this machine that breaks off, ignores ranges, or sends something else."""

import hashlib
import io
import re
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from coco import download
from coco.download import Archive, fetch_archive, is_complete, unpack_archive
from coco.errors import DataError
from scripts import download_coco


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


CONTENT = zipped({"pictures/": "", "pictures/a.jpg": "a" * 3000, "pictures/b.jpg": "b" * 3000, "other/c.json": "c"})
MEMBERS = ("pictures",)
ARCHIVE = Archive("zips/pictures.zip", len(CONTENT), hashlib.md5(CONTENT).hexdigest(), MEMBERS, 2)


class Server(HTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[int] = []
        self.content, self.most_bytes, self.knows_ranges = CONTENT, len(CONTENT), True

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        if self.path != "/zips/pictures.zip":
            self.send_error(404)
            return
        first = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        server.asked.append(first)
        self.send_response(206 if server.knows_ranges else 200)
        rest = server.content[first if server.knows_ranges else 0 :]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: server.most_bytes])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(server, root, archive=ARCHIVE, retries=2, progress=lambda have, total: None):
    return fetch_archive(archive, root, server.address, retries=retries, wait_s=0, progress=progress)


def test_broken_connections_are_taken_up_where_they_ended(server, tmp_path):
    server.most_bytes = 2500
    told = []
    path = fetch(server, tmp_path, progress=lambda have, total: told.append((have, total)))
    assert path.read_bytes() == CONTENT
    assert server.asked == [0, 2500, 5000]
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert [file.name for file in tmp_path.iterdir()] == ["pictures.zip"]
    fetch(server, tmp_path)
    assert len(server.asked) == 3, "what is there is not asked for again"


def test_a_later_call_goes_on_and_a_server_without_ranges_starts_anew(server, tmp_path):
    (tmp_path / "pictures.zip.part").write_bytes(CONTENT[:1000])
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [1000]
    server.knows_ranges = False
    other = tmp_path / "other"
    other.mkdir()
    (other / "pictures.zip.part").write_bytes(b"x" * 1000)
    assert fetch(server, other).read_bytes() == CONTENT


def test_another_file_is_not_believed(server, tmp_path):
    server.content = CONTENT[:-1] + b"?"
    with pytest.raises(DataError, match=r"must have the md5 \w+, got \w+; it was removed"):
        fetch(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dead_connection_and_an_unknown_path_end_in_a_line(server, tmp_path):
    server.most_bytes = 0
    with pytest.raises(DataError, match=r"must last, got .* at 0 of .*; call again to go on"):
        fetch(server, tmp_path)
    assert len(server.asked) == 3
    unknown = Archive("zips/unknown.zip", 5, "", MEMBERS, 2)
    with pytest.raises(DataError, match=r"must have zips/unknown.zip, got HTTP Error 404"):
        fetch(server, tmp_path, unknown)


def test_a_full_disk_is_refused_before_anything_is_asked(server, tmp_path):
    huge = Archive("zips/pictures.zip", 1 << 60, "", MEMBERS, 2)
    with pytest.raises(DataError, match="free disk space must be twice"):
        fetch(server, tmp_path, huge)
    assert server.asked == []


def test_unpacking_takes_what_is_wanted_or_nothing(tmp_path):
    path = tmp_path / "pictures.zip"
    path.write_bytes(CONTENT)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "rest").touch()
    assert not is_complete(ARCHIVE, tmp_path)
    unpack_archive(ARCHIVE, path, tmp_path)
    assert is_complete(ARCHIVE, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"pictures.zip", "pictures"}
    path.write_bytes(zipped({"pictures/a.jpg": "a"}))
    with pytest.raises(DataError, match="archive must hold 2 files under pictures, got 1"):
        unpack_archive(ARCHIVE, path, tmp_path)
    assert is_complete(ARCHIVE, tmp_path)


def test_the_script_fetches_what_is_missing(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download_coco, "ARCHIVES", {"val": ARCHIVE})
    arguments = [str(tmp_path), "--server", server.address, "--wait", "0", "--only", "val"]
    assert download_coco.main(arguments) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["pictures"]
    assert download_coco.main(arguments) == 0
    assert len(server.asked) == 1
    assert "complete" in capsys.readouterr().err
    server.content = b"?"
    assert download_coco.main([str(tmp_path / "b"), *arguments[1:], "--retries", "0"]) == 1
    assert "error: " in capsys.readouterr().err


def test_the_published_archives_fit_the_settings_of_data_coco():
    members = {member for archive in download.ARCHIVES.values() for member in archive.members}
    assert members == {
        "annotations/instances_train2017.json",
        "annotations/instances_val2017.json",
        "train2017",
        "val2017",
    }
    assert all(re.fullmatch("[0-9a-f]{32}", archive.md5) for archive in download.ARCHIVES.values())
