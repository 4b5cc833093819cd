# Runs outside the new root file system, "$1", and writes it into the ext4 image "$image".
set -eu

# mmdebstrap keeps /dev, /proc and /sys mounted in the tree; a bind mount of the tree alone leaves them out.
plain="$1.plain"
mkdir "$plain"
if mount --bind "$1" "$plain" 2>/dev/null; then
	trap 'umount "$plain"; rmdir "$plain"' EXIT
else
	rmdir "$plain"
	plain="$1"
fi
used_kib=$(du --summarize --block-size=1K --one-file-system "$plain" | cut -f1)

# Journal and tables are zero by being sparse, so nothing is left for the guest's kernel to initialise in the
# background of every machine. One per cent stays for root, so that a full disk can be cleaned up.
work="$1.ext4"
rm -f "$work"
mke2fs -q -F -t ext4 -L root -m 1 -J size=32 -E lazy_itable_init=0,lazy_journal_init=0 \
	-d "$plain" "$work" "$((used_kib + used_kib / 5 + 131072))k"
mv "$work" "$image"
