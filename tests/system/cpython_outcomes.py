"""Runs CPython's own regression tests and prints one line per test case: outcome and name.

    python3.11 cpython_outcomes.py test_json test_re ...

The same on the host and in a sandbox. Cases that fail are run once more, by themselves: some measure time
and lose when something else has the processor. No certificates are trusted by default: the tests bring their own,
and loading the system's hundreds of times is most of what an emulated processor would do.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree


def run(modules, only=()):
    with tempfile.TemporaryDirectory() as scratch:
        report = os.path.join(scratch, "report.xml")
        command = [sys.executable, "-m", "test", "--junit-xml", report, "-j2", "--timeout", "3000"]
        for name in only:
            command += ["-m", name]
        log = os.path.join(scratch, "log")
        environment = {**os.environ, "SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": scratch}
        with open(log, "wb") as output:
            subprocess.run(
                command + list(modules), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=scratch, env=environment
            )
        with open(log, errors="replace") as output:
            text = output.read()
        if not only:
            sys.stderr.write(text[-200_000:])
        try:
            tree = xml.etree.ElementTree.parse(report)
        except (OSError, xml.etree.ElementTree.ParseError):
            sys.exit("the tests left no report")
    outcomes = {}
    for case in tree.iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "fail" if kinds & {"failure", "error"} else "skip" if "skipped" in kinds else "pass"
        outcomes[case.get("name")] = outcome
    return outcomes


def main():
    modules = sys.argv[1:]
    outcomes = run(modules)
    failed = [name for name, outcome in outcomes.items() if outcome == "fail"]
    if failed:
        again = run(modules, failed)
        outcomes.update((name, again.get(name, "fail")) for name in failed)
    for name, outcome in sorted(outcomes.items()):
        print(outcome, name)


main()
