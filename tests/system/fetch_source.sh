#!/bin/sh
# Fetches the upstream source of a Debian package, without touching the host's package lists:
#   fetch_source.sh PACKAGE DIRECTORY
set -eu
package=$1
mkdir -p "$2"
cd "$2"
if [ -e "$package.tar" ]; then
	exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial"
: > "$work/status"
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" \
	> "$work/sources.list"
apt() {
	apt-get -qq -o Dir::State="$work/state" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
		-o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o APT::Sandbox::User= "$@"
}
apt update
(cd "$work" && apt source --download-only "$package")
tar -C "$work" -cf "$work/out" --transform "s,^.*orig,$package.orig," $(cd "$work" && ls ./*.orig.tar.* | grep -v '\.asc$')
mv "$work/out" "$package.tar"
