# Runs as root inside the new root file system, after its packages are installed.
set -eu

# The user agents work as.
useradd --uid 1000 --user-group --create-home --home-dir /home/user --shell /bin/bash --groups sudo user
echo 'user ALL=(ALL:ALL) NOPASSWD:ALL' > /etc/sudoers.d/user
chmod 0440 /etc/sudoers.d/user

# The machine is thrown away: pip may install into the system, as it does in the images agents know.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
printf '[global]\nbreak-system-packages = true\nroot-user-action = ignore\ndisable-pip-version-check = true\n' > /etc/pip.conf

# Places where agents put code and tools without asking.
mkdir -p /code
chmod 0777 /code
find /usr/local -type d -exec chmod 0777 {} +

# Names, locale, terminal. A machine's own name is found without a line in the table of hosts, which is the user's.
printf '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n' > /etc/hosts
sed -i 's/^hosts:.*/hosts: files myhostname dns/' /etc/nsswitch.conf
: > /etc/fstab
printf 'LANG=C.UTF-8\n' > /etc/default/locale
printf 'LANG=C.UTF-8\nPATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n' > /etc/environment
# Debian's profile gives ordinary users a PATH without the sbin folders, and overwrites what was set.
printf 'export LANG="${LANG:-C.UTF-8}"\nPATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"\n' > /etc/profile.d/sandbox.sh
chmod 1777 /tmp /var/tmp

# What must differ from machine to machine, and what only the build needed. The agent writes names and ids to memory.
ln -sf /run/stockade/hostname /etc/hostname
ln -sf /run/stockade/machine-id /etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_* /etc/resolv.conf
: > /etc/resolv.conf
rm -f /etc/apt/apt.conf.d/*mmdebstrap /var/lib/dpkg/*-old /var/cache/debconf/*-old
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /tmp/* /root/.cache
mkdir -p /var/lib/apt/lists/partial /var/cache/apt/archives/partial /var/log/apt
