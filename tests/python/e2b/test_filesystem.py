"""sandbox.files"""

import hashlib
import io
import os

import pytest
from e2b import FileType, InvalidArgumentException, NotEnoughSpaceException, NotFoundException, Sandbox
from e2b.exceptions import AuthenticationException

BINARY = bytes(range(256)) * 41


def test_write_and_read_text(box, place):
    info = box.files.write(f"{place}/text.txt", "héllo\n🙂")
    assert (info.name, info.path, info.type) == ("text.txt", f"{place}/text.txt", FileType.FILE)
    assert box.files.read(f"{place}/text.txt") == "héllo\n🙂"


def test_write_and_read_bytes(box, place):
    box.files.write(f"{place}/data", BINARY)
    assert bytes(box.files.read(f"{place}/data", format="bytes")) == BINARY


def test_read_as_a_stream(box, place):
    data = BINARY * 100
    box.files.write(f"{place}/data", data)
    assert b"".join(box.files.read(f"{place}/data", format="stream")) == data


def test_empty_files(box, place):
    box.files.write(f"{place}/empty", "")
    assert box.files.read(f"{place}/empty") == ""
    assert bytes(box.files.read(f"{place}/empty", format="bytes")) == b""
    assert box.files.get_info(f"{place}/empty").size == 0


def test_gzip_both_ways(box, place):
    box.files.write(f"{place}/packed", BINARY * 10, gzip=True)
    assert bytes(box.files.read(f"{place}/packed", format="bytes")) == BINARY * 10
    assert bytes(box.files.read(f"{place}/packed", format="bytes", gzip=True)) == BINARY * 10


def test_write_a_file_object(box, place):
    box.files.write(f"{place}/object", io.BytesIO(BINARY))
    assert bytes(box.files.read(f"{place}/object", format="bytes")) == BINARY
    box.files.write(f"{place}/multipart", io.BytesIO(BINARY), use_octet_stream=False)
    assert bytes(box.files.read(f"{place}/multipart", format="bytes")) == BINARY


@pytest.mark.current
def test_write_an_iterable(box, place):
    box.files.write(f"{place}/pieces", (bytes([n]) * 1000 for n in range(100)))
    assert box.files.get_info(f"{place}/pieces").size == 100_000


def test_octet_stream(box, place):
    box.files.write(f"{place}/octets", BINARY, use_octet_stream=True)
    assert bytes(box.files.read(f"{place}/octets", format="bytes")) == BINARY


def test_write_several_at_once(box, place):
    files = [{"path": f"{place}/many/{n}.txt", "data": f"file {n}"} for n in range(10)]
    infos = box.files.write_files(files)
    assert [info.path for info in infos] == [file["path"] for file in files]
    assert box.files.read(f"{place}/many/7.txt") == "file 7"
    assert box.files.write_files([]) == []


@pytest.mark.parametrize("name", ["a b", "ü", "quote\"quote", "semi;colon", "percent%20", "back\\slash", "new\nline", "+&=#?"])
def test_odd_names(box, place, name):
    path = f"{place}/{name}"
    box.files.write(path, name)
    assert box.files.read(path) == name
    assert [entry.name for entry in box.files.list(place)] == [name]
    box.files.remove(path)
    assert not box.files.exists(path)


@pytest.mark.parametrize("name", ["a b", "ü", "quote\"quote", "semi;colon", "back\\slash"])
def test_odd_names_in_one_upload_of_several(box, place, name):
    infos = box.files.write_files([{"path": f"{place}/{name}", "data": "1"}, {"path": f"{place}/z", "data": "2"}])
    assert infos[0].path == f"{place}/{name}"
    assert box.files.read(f"{place}/{name}") == "1"


def test_overwriting_keeps_the_mode(box, place):
    path = f"{place}/script"
    box.files.write(path, "a longer first text")
    box.commands.run(f"chmod 750 {path}")
    box.files.write(path, "short")
    assert box.files.read(path) == "short"
    assert box.files.get_info(path).mode == 0o750


def test_reading_what_is_not_there_or_no_file(box, place):
    with pytest.raises(NotFoundException, match="does not exist"):
        box.files.read(f"{place}/nothing")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        box.files.read(place)


def test_writing_over_a_directory_is_refused(box, place):
    with pytest.raises(InvalidArgumentException):
        box.files.write(place, "x")


def test_a_virtual_file_comes_whole(box):
    assert box.files.read("/proc/version").startswith("Linux")


def test_list(box, place):
    box.files.make_dir(f"{place}/b/c")
    box.files.write(f"{place}/a.txt", "12345")
    entries = box.files.list(place)
    assert [(entry.name, entry.type) for entry in entries] == [("a.txt", FileType.FILE), ("b", FileType.DIR)]
    assert entries[0].size == 5
    deep = [entry.path for entry in box.files.list(place, depth=2)]
    assert deep == [f"{place}/a.txt", f"{place}/b", f"{place}/b/c"]


@pytest.mark.machine
def test_no_path_is_the_home_directory(box):
    box.files.write("in-the-home", "")
    assert "in-the-home" in [entry.name for entry in box.files.list("")]
    assert box.files.exists("")
    assert box.files.get_info("").path == "/home/user"
    box.files.remove("in-the-home")


def test_list_of_what_is_no_directory(box, place):
    box.files.write(f"{place}/file", "")
    with pytest.raises(InvalidArgumentException):
        box.files.list(f"{place}/file")
    with pytest.raises(NotFoundException):
        box.files.list(f"{place}/nothing")
    with pytest.raises(InvalidArgumentException):
        box.files.list(place, depth=0)


def test_links(box, place):
    box.commands.run("mkdir real; echo hi > real/file; ln -s real/file to_file; ln -s real to_dir; ln -s none dangling", cwd=place)
    entries = {entry.name: entry for entry in box.files.list(place, depth=3)}
    assert set(entries) == {"real", "file", "to_file", "to_dir", "dangling"}
    assert entries["to_file"].symlink_target == f"{place}/real/file"
    assert entries["to_dir"].permissions.startswith("L")
    assert entries["dangling"].type == FileType.SYMLINK
    if hasattr(entries["to_file"], "symlink_target") and entries["to_file"].type == FileType.SYMLINK:
        assert entries["to_dir"].type == FileType.SYMLINK
    else:
        assert entries["to_dir"].type == FileType.DIR


def test_exists(box, place):
    assert box.files.exists(place)
    assert not box.files.exists(f"{place}/nothing")


def test_info(box, place):
    box.files.write(f"{place}/f", "abc")
    box.commands.run("chmod 640 f; touch -d '2020-01-02T03:04:05Z' f", cwd=place)
    info = box.files.get_info(f"{place}/f")
    assert (info.name, info.type, info.size, info.mode) == ("f", FileType.FILE, 3, 0o640)
    assert info.permissions == "-rw-r-----"
    assert info.modified_time.isoformat().startswith("2020-01-02T03:04:05")
    assert info.symlink_target is None
    assert info.owner == box.commands.run("id -un").stdout.strip()
    assert box.files.get_info(place).permissions == "drwxr-xr-x"
    with pytest.raises(NotFoundException):
        box.files.get_info(f"{place}/nothing")


def test_make_dir(box, place):
    assert box.files.make_dir(f"{place}/x/y/z") is True
    assert box.files.make_dir(f"{place}/x/y/z") is False
    box.files.write(f"{place}/file", "")
    with pytest.raises(InvalidArgumentException):
        box.files.make_dir(f"{place}/file")


def test_rename(box, place):
    box.files.write(f"{place}/old", "content")
    info = box.files.rename(f"{place}/old", f"{place}/new/name")
    assert (info.path, info.name) == (f"{place}/new/name", "name")
    assert box.files.read(f"{place}/new/name") == "content"
    assert not box.files.exists(f"{place}/old")
    with pytest.raises(NotFoundException):
        box.files.rename(f"{place}/old", f"{place}/other")


def test_remove(box, place):
    box.files.write(f"{place}/tree/deep/file", "x")
    box.files.remove(f"{place}/tree")
    assert not box.files.exists(f"{place}/tree")
    box.files.remove(f"{place}/tree")


def test_metadata(box, place):
    path = f"{place}/described"
    info = box.files.write(path, "x", metadata={"Author": "me & you", "k-2": ""})
    assert info.metadata == {"author": "me & you", "k-2": ""}
    assert box.files.get_info(path).metadata["author"] == "me & you"
    box.files.write(path, "y", metadata={"other": "1"})
    assert box.files.get_info(path).metadata == {"other": "1"}
    box.files.write(path, "z")
    assert box.files.get_info(path).metadata is None


@pytest.mark.machine
def test_users_own_what_they_write(box):
    box.files.write("/root/secret", "s", user="root")
    assert box.files.get_info("/root/secret", user="root").owner == "root"
    assert box.files.read("/root/secret", user="root") == "s"
    with pytest.raises(Exception):
        box.files.read("/root/secret")
    box.files.write("/home/user/deep/er/file", "x")
    assert box.files.get_info("/home/user/deep").owner == "user"


def test_an_unknown_user_is_refused_by_name(box):
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        box.files.list("/", user="nobody-here")
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        box.files.read("/etc/passwd", user="nobody-here")


@pytest.mark.machine
def test_relative_paths_and_tilde(box):
    assert box.files.write("relative.txt", "r").path == "/home/user/relative.txt"
    assert box.files.read("~/relative.txt") == "r"
    assert box.files.read("/home/user/relative.txt") == "r"


def test_twenty_megabytes_both_ways(box, place):
    data = os.urandom(1 << 20) * 20
    box.files.write(f"{place}/big", data)
    assert bytes(box.files.read(f"{place}/big", format="bytes")) == data
    box.files.write(f"{place}/big2", io.BytesIO(data))
    assert b"".join(box.files.read(f"{place}/big2", format="stream")) == data


@pytest.mark.machine
@pytest.mark.current
def test_a_hundred_megabytes_both_ways(box, place):
    piece = os.urandom(1 << 20)
    digest = hashlib.sha256(piece * 100).hexdigest()
    box.files.write(f"{place}/huge", io.BytesIO(piece * 100), request_timeout=600)
    assert box.commands.run(f"sha256sum < {place}/huge", timeout=600).stdout.split()[0] == digest
    seen = hashlib.sha256()
    for chunk in box.files.read(f"{place}/huge", format="stream", request_timeout=600):
        seen.update(chunk)
    assert seen.hexdigest() == digest


def test_ranges(box, place, edge):
    box.files.write(f"{place}/r", "0123456789")
    host = box.get_host(49983)
    headers = {"X-Access-Token": box._envd_access_token}
    read = lambda text: edge.request("GET", host, f"/files?path={place}/r", headers={**headers, "Range": text})
    part = read("bytes=2-4")
    assert (part.status_code, part.text, part.headers["content-range"]) == (206, "234", "bytes 2-4/10")
    assert read("bytes=-3").text == "789"
    assert read("bytes=7-").text == "789"
    assert read("bytes=10-").status_code == 416


def test_compose(box, place, edge):
    box.files.write_files([{"path": f"{place}/{n}", "data": str(n) * 3} for n in range(3)])
    body = {"source_paths": [f"{place}/{n}" for n in range(3)], "destination": f"{place}/all"}
    headers = {"X-Access-Token": box._envd_access_token}
    answer = edge.request("POST", box.get_host(49983), "/files/compose", headers=headers, json=body)
    assert answer.status_code == 200, answer.text
    assert box.files.read(f"{place}/all") == "000111222"
    assert [entry.name for entry in box.files.list(place)] == ["all"]


@pytest.mark.machine
def test_a_full_disk_is_told_and_nothing_half_written_stays():
    sandbox = Sandbox.create(timeout=300)
    try:
        # Reserved, not written: the host's disk does not fill up.
        fill = "sudo fallocate -l $(( $(df --output=avail -B1 / | tail -1) - 1000000 )) /fill; sudo dd if=/dev/zero of=/fill.rest bs=4k || true"
        sandbox.commands.run(fill, timeout=120)
        with pytest.raises(NotEnoughSpaceException):
            sandbox.files.write("/home/user/large", b"x" * 1_000_000)
        assert not sandbox.files.exists("/home/user/large")
        sandbox.commands.run("sudo rm /fill.rest")
        sandbox.files.write("/home/user/small", b"x" * 1000)
        assert sandbox.files.read("/home/user/small") == "x" * 1000
    finally:
        sandbox.kill()
