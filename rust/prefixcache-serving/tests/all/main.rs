//! The tests of what the crate offers, as one program, which is linked once.

mod choice;
mod drafts;
mod in_turn;
mod index;
mod json;
mod stops;
