//! The tests of what the crate offers, as one program, which is linked once.

#[path = "../../../prefixcache-cpu/tests/common/cases.rs"]
mod cases;
mod common;
mod conv;
mod delta;
mod kernel;
#[path = "../../../prefixcache-cpu/tests/common/noise.rs"]
mod noise;
