//! What the CPU kernels share.
//!
//! The kernels promise that an output element is the same, bit for bit, however many other rows
//! are computed with it and however the work is split over threads. Everything here serves that:
//!
//! - [`Form`] picks the processor's instructions once; the promise holds within a form.
//! - [`Lanes`] is one vector of a form. Each lane computes alone and lanes are never mixed but in
//!   sums of a fixed order, so a value does not depend on the lane it stands in.
//! - [`tile::dot_tile`] adds products to an element one after the other along the depth: a chain
//!   that is a function of the depth alone, whatever the height and width of the tile around it.
//! - [`Team`] runs independent tasks on a few threads; which thread runs a task leaves no trace.

/// Methods of a form's vectors, inlined into kernels.
macro_rules! operations {
    ($(
        fn $name:ident$(<$(const $param:ident: $of:ty),+>)?($self:ident $(, $arg:ident: $type:ty)*)
            -> $result:ty $body:block
    )*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, reason = "the portable forms are plain Rust")]
        fn $name$(<$(const $param: $of),+>)?($self $(, $arg: $type)*) -> $result {
            // SAFETY: the value proves that the processor has the instructions; references are to as many
            // numbers as are read.
            unsafe { $body }
        }
    )*};
    ($(unsafe fn $name:ident($self:ident $(, $arg:ident: $type:ty)*) $(-> $result:ty)? $body:block)*) => {$(
        #[inline(always)]
        unsafe fn $name($self $(, $arg: $type)*) $(-> $result)? {
            // SAFETY: as above, and the caller vouches for the memory that is read or written.
            unsafe { $body }
        }
    )*};
}

pub mod aligned;
pub mod bf16;
pub mod bytes;
pub mod element;
pub mod f16;
pub mod form;
pub mod lanes;
pub mod math;
pub mod memory;
pub mod rows;
pub mod team;
pub mod tile;

pub use aligned::{AlignedWords, MappedWords, WeightMemory, WordSource};
pub use bf16::Bf16;
pub use bytes::{ByteForm, ByteKernel, ByteLanes};
pub use element::Element;
pub use form::{Form, Kernel};
pub use lanes::{CodeTable, Lanes};
pub use memory::OutOfMemory;
pub use rows::{Rows, RowsMut};
pub use team::Team;
