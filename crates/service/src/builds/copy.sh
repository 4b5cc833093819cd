# Copies files of an archive into place, as a Dockerfile's COPY does.
# Arguments: archive, source pattern, absolute destination, owner, mode of files (may be empty).
set -eu
archive=$1 source=$2 destination=$3 owner=$4 mode=$5
work=$(mktemp -d)
trap 'rm -rf "$work" "$archive"' EXIT
tar --extract --file "$archive" --directory "$work" --no-same-owner
chown -R -h "$owner" "$work"
if [ -n "$mode" ]; then
	find "$work" -type f -exec chmod "$mode" {} +
fi
cd "$work"
# Patterns are expanded, words are not split.
IFS=
set -- ${source#/}
if [ "$#" -eq 1 ] && [ ! -e "$1" ] && [ ! -L "$1" ]; then
	echo "no file of the archive is called $1" >&2
	exit 1
fi
made_by() {
	# What has to be made on the way belongs to the owner, too.
	if [ -d "$1" ]; then
		return
	fi
	made_by "$(dirname "$1")"
	mkdir "$1"
	chown "$owner" "$1"
}
for match in "$@"; do
	if [ -d "$match" ] && [ ! -L "$match" ]; then
		made_by "$destination"
		cp -a "$match/." "$destination/"
	elif [ "$#" -gt 1 ] || [ -d "$destination" ] || [ "${destination%/}" != "$destination" ]; then
		made_by "${destination%/}"
		cp -a "$match" "${destination%/}/"
	else
		made_by "$(dirname "$destination")"
		cp -a "$match" "$destination"
	fi
done
