//! The pages of a layer, whichever way they keep keys and values.

use prefixcache_cpu::{Element, Form, Rows, RowsMut, Team};

use crate::Plan;
use crate::codes::append_codes;
use crate::paged::append;

/// The pages of a layer, to read: numbers as [`crate::append`] writes them, or codes as [`crate::append_codes`] does.
#[derive(Clone, Copy)]
pub enum KvPages<'a, E> {
    /// [P, 2 * K * B * D]
    Numbers(Rows<'a, E>),
    /// [P, [`crate::Attention::code_bytes`]]
    Codes(Rows<'a, u8>),
}

impl<'a, E: 'static> KvPages<'a, E> {
    /// The same pages, if their numbers are of type `U`.
    pub(crate) fn of_type<U: 'static>(self) -> Option<KvPages<'a, U>> {
        Some(match self {
            Self::Numbers(rows) => KvPages::Numbers(rows.of_type()?),
            Self::Codes(rows) => KvPages::Codes(rows),
        })
    }

    /// Pages, and what each has of numbers or bytes.
    pub(crate) fn shape(&self) -> (usize, usize) {
        match self {
            Self::Numbers(rows) => rows.shape(),
            Self::Codes(rows) => rows.shape(),
        }
    }
}

/// The pages of a layer, to write.
pub enum KvPagesMut<'a, E> {
    /// [P, 2 * K * B * D]
    Numbers(RowsMut<'a, E>),
    /// [P, [`crate::Attention::code_bytes`]]
    Codes(RowsMut<'a, u8>),
}

impl<E: Element> KvPagesMut<'_, E> {
    /// [`crate::append`] or [`crate::append_codes`].
    ///
    /// # Panics
    /// As they do.
    pub fn append(
        &self,
        form: Form,
        team: &Team,
        plan: &Plan,
        slots: &[i64],
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) {
        match self {
            Self::Numbers(cache) => append(cache, plan, slots, keys, values),
            Self::Codes(cache) => append_codes(form, team, cache, plan, slots, keys, values),
        }
    }

    /// The pages, to read for a while.
    pub fn read(&mut self) -> KvPages<'_, E> {
        match self {
            Self::Numbers(cache) => KvPages::Numbers(cache.read()),
            Self::Codes(cache) => KvPages::Codes(cache.read()),
        }
    }
}
