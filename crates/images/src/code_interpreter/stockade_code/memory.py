"""The memory of the guest: how much is left, and how often it was not enough."""

# What an interpreter takes before it has run anything, and some room for that.
KERNEL_NEEDS_MIB = 96
# With less than this the guest reads its programs from the disk again and again and does nothing else; its kernel
# does not call that out of memory, as it always finds a page to drop.
STARVED_BELOW_MIB = 24


def available_mib():
    """What programs can still have without the guest having to drop what it needs."""
    return _number("/proc/meminfo", "MemAvailable:", 1 << 30) // 1024


def is_starved():
    """Whether so little is left that nothing gets on."""
    return available_mib() < STARVED_BELOW_MIB


def oom_kills():
    """How often the guest's kernel has killed something for lack of memory."""
    return _number("/proc/vmstat", "oom_kill ", 0)


def _number(path, name, otherwise):
    try:
        with open(path, encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(name)), otherwise)
    except OSError:
        return otherwise
