"""What the studies fetch, without a network: package managers are stood in for."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def program(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\nset -e\n{script}\n")
    path.chmod(0o755)


def test_a_debian_package_is_unpacked_into_a_folder_named_from_here(tmp_path, monkeypatch):
    """As in `prepare.py --out data`: the programs run inside of it."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "studies"), *sys.path])
    import fetch

    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs, "apt-get", 'echo whole > "$3.deb"')
    program(programs, "dpkg-deb", 'mkdir "$3/usr"; cp "$2" "$3/usr/file"')
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.chdir(tmp_path)
    job = fetch.Job(Path("data/thing"), Path("data/.thing/downloads"), None)
    assert (job.from_debian("thing") / "usr" / "file").read_text() == "whole\n"
