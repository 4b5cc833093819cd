//! One address per name. The table is part of a sandbox's state: addresses a guest remembered work after a restore
//! and in forks.
//!
//! Addresses are given in order through the whole pool before one is used again, so that an address a guest kept too
//! long leads nowhere rather than to another name. When there are too many names the oldest that is not in use goes.

use std::{
    collections::{HashMap, VecDeque},
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::{Deserialize, Serialize};

use crate::policy::normalize_name;

const POOL: u32 = Ipv4Addr::new(198, 18, 0, 0).to_bits();
/// 198.18.0.0/15 without its first and last address.
const POOL_SIZE: u32 = (1 << 17) - 2;

/// The table as it is stored with a snapshot.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NameTableRecord {
    /// Place in the pool and name, the oldest first.
    pub names: Vec<(u32, String)>,
    /// The place to be given next.
    pub next: u32,
}

/// Names a table may have given away between the last time it was stored and a crash.
const LOST_AT_MOST: u32 = 4_096;

impl NameTableRecord {
    /// For a table that was not stored when its gateway ended: addresses it may have given since are given to no
    /// other name soon.
    pub fn after_crash(mut self) -> Self {
        self.next = (self.next + LOST_AT_MOST) % POOL_SIZE;
        self
    }
}

/// Why a stored table is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the stored name table is damaged: {0}")]
pub struct TableError(String);

/// Names and their addresses.
#[derive(Debug)]
pub struct NameTable {
    limit: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    by_name: HashMap<Arc<str>, u32>,
    by_place: HashMap<u32, Arc<str>>,
    order: VecDeque<u32>,
    next: u32,
    changes: u64,
}

impl NameTable {
    /// An empty table of at most `limit` names.
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.clamp(1, POOL_SIZE as usize - 1), inner: Mutex::default() }
    }

    /// A stored table.
    pub fn restore(limit: usize, record: &NameTableRecord) -> Result<Self, TableError> {
        let table = Self::new(limit);
        {
            let mut inner = table.lock();
            if record.names.len() > POOL_SIZE as usize || record.next >= POOL_SIZE {
                return Err(TableError("it is larger than the pool".to_owned()));
            }
            for (place, name) in &record.names {
                let known = normalize_name(name).filter(|normal| normal == name && *place < POOL_SIZE);
                let name: Arc<str> = known.ok_or_else(|| TableError(format!("{name:?} at {place}")))?.into();
                let twice = inner.by_name.insert(Arc::clone(&name), *place).is_some()
                    || inner.by_place.insert(*place, name).is_some();
                if twice {
                    return Err(TableError(format!("place {place} or its name is there twice")));
                }
                inner.order.push_back(*place);
            }
            inner.next = record.next;
        }
        Ok(table)
    }

    /// The table to store.
    pub fn record(&self) -> NameTableRecord {
        let inner = self.lock();
        let names = inner.order.iter().filter_map(|place| Some((*place, inner.by_place.get(place)?.to_string())));
        NameTableRecord { names: names.collect(), next: inner.next }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of `name`, given now if it has none; `None` when all names are in use.
    pub fn address(&self, name: &str) -> Option<Ipv4Addr> {
        let mut inner = self.lock();
        if let Some(place) = inner.by_name.get(name) {
            return Some(address_at(*place));
        }
        if inner.order.len() >= self.limit {
            inner.forget_oldest()?;
        }
        let place = inner.next_place()?;
        let name: Arc<str> = name.into();
        inner.by_name.insert(Arc::clone(&name), place);
        inner.by_place.insert(place, name);
        inner.order.push_back(place);
        inner.changes += 1;
        Some(address_at(place))
    }

    /// The name behind an address. While the answer is held, the name keeps its address.
    pub fn name(&self, address: Ipv4Addr) -> Option<Arc<str>> {
        self.lock().by_place.get(&place_of(address)?).cloned()
    }

    /// Whether an address belongs to the pool.
    pub fn is_ours(address: Ipv4Addr) -> bool {
        address.to_bits() >> 17 == POOL >> 17
    }

    /// Counts up whenever there is something new to store.
    pub fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// How many names there are.
    pub fn len(&self) -> usize {
        self.lock().order.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Inner {
    fn forget_oldest(&mut self) -> Option<()> {
        // Held by both maps; more holders are flows.
        let idle = |place: &u32| self.by_place.get(place).is_none_or(|name| Arc::strong_count(name) <= 2);
        let at = self.order.iter().position(idle)?;
        let place = self.order.remove(at)?;
        if let Some(name) = self.by_place.remove(&place) {
            self.by_name.remove(&name);
        }
        Some(())
    }

    fn next_place(&mut self) -> Option<u32> {
        for _ in 0..POOL_SIZE {
            let place = self.next;
            self.next = (self.next + 1) % POOL_SIZE;
            if !self.by_place.contains_key(&place) {
                return Some(place);
            }
        }
        None
    }
}

fn address_at(place: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(POOL + 1 + place)
}

fn place_of(address: Ipv4Addr) -> Option<u32> {
    address.to_bits().checked_sub(POOL + 1).filter(|place| *place < POOL_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address_through_store_and_restore() {
        let table = NameTable::new(10);
        let a = table.address("a.example").expect("an address");
        let b = table.address("b.example").expect("an address");
        assert_ne!(a, b);
        assert_eq!(table.address("a.example"), Some(a));
        let json = serde_json::to_string(&table.record()).expect("json");
        let again = NameTable::restore(10, &serde_json::from_str(&json).expect("json")).expect("a table");
        assert_eq!(again.name(a).as_deref(), Some("a.example"));
        assert_eq!(again.address("b.example"), Some(b));
        assert_ne!(again.address("c.example"), Some(a));
    }

    #[test]
    fn a_flood_of_names_forgets_old_ones_and_never_those_in_use() {
        let table = NameTable::new(8);
        let kept = table.address("kept.example").expect("an address");
        let held = table.name(kept);
        for number in 0..1_000 {
            table.address(&format!("n{number}.example")).expect("an address");
        }
        assert_eq!(table.len(), 8);
        assert_eq!(table.name(kept), held);
        assert_eq!(table.address("kept.example"), Some(kept));
    }

    #[test]
    fn a_damaged_table_is_refused() {
        let bad = |names: Vec<(u32, String)>, next| NameTable::restore(8, &NameTableRecord { names, next }).is_err();
        assert!(bad(vec![(1, "a.example".into()), (1, "b.example".into())], 2));
        assert!(bad(vec![(1, "a.example".into()), (2, "a.example".into())], 2));
        assert!(bad(vec![(POOL_SIZE, "a.example".into())], 2));
        assert!(bad(vec![(1, "10.0.0.1".into())], 2));
        assert!(bad(vec![], POOL_SIZE));
    }
}
