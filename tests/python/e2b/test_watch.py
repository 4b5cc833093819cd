"""sandbox.files.watch_dir"""

import asyncio

import pytest
from e2b import AsyncSandbox, FilesystemEventType, InvalidArgumentException, NotFoundException
from e2b.exceptions import SandboxException

from conftest import eventually

CREATE, CHMOD, WRITE = FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE


def kinds(events, name):
    return [event.type for event in events if event.name == name]


@pytest.mark.machine
def test_an_upload_of_a_new_file_is_three_events_at_once(box, place):
    handle = box.files.watch_dir(place)
    box.files.write(f"{place}/new.txt", "content")
    events = handle.get_new_events()
    assert sorted(event.type.value for event in events) == sorted(kind.value for kind in (CREATE, CHMOD, WRITE))
    assert events[0].type == CREATE
    assert {event.name for event in events} == {"new.txt"}
    assert handle.get_new_events() == []
    handle.stop()


def test_an_overwrite_is_seen_as_a_write(box, place):
    box.files.write(f"{place}/f", "old")
    handle = box.files.watch_dir(place)
    box.files.write(f"{place}/f", "new")
    events = handle.get_new_events()
    assert WRITE in kinds(events, "f")
    assert CREATE not in kinds(events, "f")
    handle.stop()


def test_remove_and_rename(box, place):
    box.files.write(f"{place}/a", "")
    box.files.write(f"{place}/b", "")
    handle = box.files.watch_dir(place)
    box.files.remove(f"{place}/a")
    box.files.rename(f"{place}/b", f"{place}/c")
    events = handle.get_new_events()
    assert FilesystemEventType.REMOVE in kinds(events, "a")
    assert FilesystemEventType.RENAME in kinds(events, "b")
    assert CREATE in kinds(events, "c")
    handle.stop()


def test_only_recursive_watches_see_below(box, place):
    box.files.make_dir(f"{place}/sub")
    flat = box.files.watch_dir(place)
    deep = box.files.watch_dir(place, recursive=True)
    box.files.write(f"{place}/sub/f", "x")
    assert WRITE in kinds(deep.get_new_events(), "sub/f")
    assert kinds(flat.get_new_events(), "sub/f") == []
    flat.stop()
    deep.stop()


def test_directories_made_later_are_covered(box, place):
    handle = box.files.watch_dir(place, recursive=True)
    box.files.make_dir(f"{place}/later/deeper")
    seen = []
    eventually(lambda: seen.extend(handle.get_new_events()) or kinds(seen, "later"))
    box.files.write(f"{place}/later/deeper/f", "x")
    eventually(lambda: seen.extend(handle.get_new_events()) or WRITE in kinds(seen, "later/deeper/f"))
    handle.stop()


def test_entries_with_events(box, place):
    handle = box.files.watch_dir(place, include_entry=True)
    box.files.write(f"{place}/f", "12345")
    entries = [event.entry for event in handle.get_new_events() if event.type == WRITE]
    assert entries and entries[-1].path == f"{place}/f"
    handle.stop()


def test_what_cannot_be_watched(box, place):
    with pytest.raises(NotFoundException):
        box.files.watch_dir(f"{place}/nothing")
    box.files.write(f"{place}/file", "")
    with pytest.raises(InvalidArgumentException):
        box.files.watch_dir(f"{place}/file")


def test_a_stopped_watch_is_over(box, place):
    handle = box.files.watch_dir(place)
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()


def test_the_asynchronous_client_listens_to_a_stream(box, place):
    async def story():
        sandbox = await AsyncSandbox.connect(box.sandbox_id)
        events, seen = [], asyncio.Event()

        def on_event(event):
            events.append(event)
            if event.type == WRITE:
                seen.set()

        handle = await sandbox.files.watch_dir(place, on_event=on_event)
        await sandbox.files.write(f"{place}/async.txt", "x")
        await asyncio.wait_for(seen.wait(), 60)
        await handle.stop()
        return events

    events = asyncio.run(story())
    assert {event.name for event in events} == {"async.txt"}
    assert events[0].type == CREATE
