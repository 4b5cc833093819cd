use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// Text that must not be printed. `expose` is the only way in, so `grep expose` is the audit.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes the text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// `prefix` and `2 * bytes` hexadecimal digits from the kernel's random generator.
    pub fn random_hex(prefix: &str, bytes: usize) -> Self {
        let mut raw = Zeroizing::new(vec![0; bytes]);
        getrandom::fill(&mut raw).expect("the kernel's random generator works once it is seeded");
        let digits: String = raw.iter().map(|byte| format!("{byte:02x}")).collect();
        Self::new(format!("{prefix}{digits}"))
    }

    /// The text itself.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Compares in time that depends on the lengths alone.
    pub fn matches(&self, other: &str) -> bool {
        self.0.as_bytes().ct_eq(other.as_bytes()).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}
