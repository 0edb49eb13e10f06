//! The tests of what the crate offers, as one program, which is linked once.

mod blocks;
#[path = "../../../prefixcache-cpu/tests/common/cases.rs"]
mod cases;
mod experts;
mod int8;
mod layers;
#[path = "../../../prefixcache-cpu/tests/common/noise.rs"]
mod noise;

use prefixcache_cpu::{Element, Form, Rows, RowsMut, Team};
use prefixcache_ops::PackedLinear;

/// What a layer makes of rows of `x`.
fn forward<E: Element, O: Element>(
    layer: &PackedLinear<E>,
    form: Form,
    team: &Team,
    x: &[E],
    residual: Option<&[O]>,
) -> Vec<O> {
    let (x, outputs) = (Rows::new(x, layer.inputs()), layer.outputs());
    let mut out = vec![O::from_f32(f32::NAN); x.rows() * outputs];
    let residual = residual.map(|rows| Rows::new(rows, outputs));
    let to = RowsMut::new(&mut out, outputs);
    layer.forward(form, team, x, residual, &to).expect("memory");
    out
}

/// The weights of these outputs.
fn read<E: Element>(layer: &PackedLinear<E>, team: &Team, outputs: &[usize]) -> Vec<E> {
    let mut rows = vec![E::from_f32(f32::NAN); outputs.len() * layer.inputs()];
    layer.read_rows(team, outputs, &RowsMut::new(&mut rows, layer.inputs()));
    rows
}
