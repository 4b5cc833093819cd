//! A directory entry as `ls -l` shows it; clients print it as it is.

use std::{fs::Metadata, os::unix::fs::MetadataExt as _};

const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

pub(super) fn line(name: &[u8], meta: &Metadata) -> Vec<u8> {
    let head = format!(
        "{} {:>4} {:<8} {:<8} {:>10} {} ",
        mode_text(meta.mode()),
        meta.nlink(),
        meta.uid(),
        meta.gid(),
        meta.size(),
        day(meta.mtime()),
    );
    [head.as_bytes(), name].concat()
}

fn mode_text(mode: u32) -> String {
    let kind = match mode & libc::S_IFMT {
        libc::S_IFDIR => 'd',
        libc::S_IFLNK => 'l',
        libc::S_IFCHR => 'c',
        libc::S_IFBLK => 'b',
        libc::S_IFIFO => 'p',
        libc::S_IFSOCK => 's',
        _ => '-',
    };
    let bit = |shift: u32, letter| if mode >> shift & 1 == 1 { letter } else { '-' };
    let execute = |shift: u32, special: u32, both, only| match (mode >> shift & 1 == 1, mode & special != 0) {
        (true, true) => both,
        (false, true) => only,
        (true, false) => 'x',
        (false, false) => '-',
    };
    [
        kind,
        bit(8, 'r'),
        bit(7, 'w'),
        execute(6, libc::S_ISUID, 's', 'S'),
        bit(5, 'r'),
        bit(4, 'w'),
        execute(3, libc::S_ISGID, 's', 'S'),
        bit(2, 'r'),
        bit(1, 'w'),
        execute(0, libc::S_ISVTX, 't', 'T'),
    ]
    .into_iter()
    .collect()
}

/// Day and year, in UTC.
fn day(seconds: i64) -> String {
    // Days since 1 March of year 0, in cycles of 400 years; months count from March.
    let days = seconds.div_euclid(86_400) + 719_468;
    let (cycle, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let year = cycle * 400 + year + i64::from(month >= 10);
    let month = MONTHS[((month + 2) % 12) as usize];
    format!("{month} {day:>2}  {year}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_modes_read_as_ls_has_them() {
        let days =
            [(0, "Jan  1  1970"), (951_782_400, "Feb 29  2000"), (-1, "Dec 31  1969"), (4_102_444_800, "Jan  1  2100")];
        for (seconds, text) in days {
            assert_eq!(day(seconds), text);
        }
        assert_eq!(mode_text(0o100_644), "-rw-r--r--");
        assert_eq!(mode_text(0o041_777), "drwxrwxrwt");
        assert_eq!(mode_text(0o106_750), "-rwsr-s---");
    }
}
