//! The Python class `RowOps`: layers without a weight matrix.

use prefixcache_ops::rowwise::{Gate, RmsNorm, gated, rms_norm, rotate, softcap};
use pyo3::prelude::*;

use crate::arguments::{Number, OneOf, Real, Word, or};
use crate::cpu::{Cpu, DType, Matrix, with_dtype};
use crate::detach::run_on_numbers;
use crate::errors::{Result, ensure, out_of_range};
use crate::names::{self, Name};

/// Norms, gates and rotary positions, row by row, of tensors of one type.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct RowOps {
    cpu: Py<Cpu>,
    dtype: DType,
}

fn check_divides(name: &'static str, part: usize, whole: usize) -> Result<()> {
    let divides = part > 0 && whole.is_multiple_of(part);
    ensure!(divides, name, "must divide {whole}, not be {part}");
    Ok(())
}

fn doubled<N: Name>(half: &Number<N>) -> Result<usize> {
    let reason = || format!("must be below 2**63, not {}", half.0);
    let twice = half.0.checked_mul(2);
    twice.ok_or_else(|| out_of_range(N::NAME, reason()))
}

impl Word for Gate {
    const ARGUMENT: &'static str = "gate";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("silu", Self::Silu),
        ("gelu_tanh", Self::GeluTanh),
        ("clamped_swiglu", Self::ClampedSwiglu),
        ("squared_relu", Self::SquaredRelu),
    ];
}

#[pymethods]
impl RowOps {
    /// Layers on tensors of type "bfloat16" or "float32".
    #[new]
    fn new(cpu: Py<Cpu>, dtype: OneOf<DType>) -> Self {
        let dtype = dtype.0;
        Self { cpu, dtype }
    }

    /// Write x / sqrt(mean(x^2) + eps) * (weight + offset), for each `group` numbers of a row, to `out`.
    #[pyo3(
        signature = (x, rows, width, x_stride, weight, weight_width, group, eps, out, *, offset=None),
        text_signature = "($self, x, rows, width, x_stride, weight, weight_width, group, eps, out, *, offset=0.0)"
    )]
    fn rms_norm(
        &self,
        py: Python<'_>,
        x: Number<names::X>,
        rows: Number<names::RowCount>,
        width: Number<names::Width>,
        x_stride: Number<names::XStride>,
        weight: Number<names::Weight>,
        weight_width: Number<names::WeightWidth>,
        group: Number<names::GroupWidth>,
        eps: Real<names::Eps>,
        out: Number<names::Out>,
        offset: Option<Real<names::Offset>>,
    ) -> Result<()> {
        let (rows, width, group, eps) = (rows.0, width.0, group.0, eps.0);
        let offset = or(offset, 0.0);
        check_divides("group", group, weight_width.0)?;
        check_divides("weight_width", weight_width.0, width)?;
        let x = Matrix::strided(x, (rows, width), x_stride.0);
        let weight = Matrix::dense(weight, 1, weight_width.0);
        let out = Matrix::dense(out, rows, width);
        let cpu = self.cpu.get();
        run_on_numbers(py, out.numbers(), || {
            with_dtype!(self.dtype, E => {
                // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
                let (x, weight, out) =
                    unsafe { (x.rows::<E>()?, weight.rows()?, out.rows_mut::<E>()?) };
                let norm = RmsNorm { weight: weight.row(0), offset, group, eps };
                rms_norm(cpu.form, &cpu.team, norm, x, None, &out);
            });
            Ok(())
        })
    }

    /// Write gate(x[:width]) * x[width:] for rows of 2 * width numbers to `out`, dense.
    fn gated(
        &self,
        py: Python<'_>,
        gate: OneOf<Gate>,
        x: Number<names::X>,
        rows: Number<names::RowCount>,
        width: Number<names::Width>,
        x_stride: Number<names::XStride>,
        out: Number<names::Out>,
    ) -> Result<()> {
        let wide = match gate.0.width() {
            1 => width.0,
            _ => doubled(&width)?,
        };
        let x = Matrix::strided(x, (rows.0, wide), x_stride.0);
        let out = Matrix::dense(out, rows.0, width.0);
        let cpu = self.cpu.get();
        run_on_numbers(py, out.numbers(), || {
            with_dtype!(self.dtype, E => {
                // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
                let (x, out) = unsafe { (x.rows::<E>()?, out.rows_mut()?) };
                gated(cpu.form, &cpu.team, gate.0, x, &out);
            });
            Ok(())
        })
    }

    /// Replace each number x of dense float32 rows by cap * tanh(x / cap).
    fn softcap(
        &self,
        py: Python<'_>,
        x: Number<names::X>,
        rows: Number<names::RowCount>,
        width: Number<names::Width>,
        cap: Real<names::Cap>,
    ) -> Result<()> {
        let x = Matrix::dense(x, rows.0, width.0);
        let cpu = self.cpu.get();
        run_on_numbers(py, x.numbers(), || {
            // SAFETY: the caller gives the address of a tensor of this type and shape, and keeps it.
            let mut x = unsafe { x.rows_mut()? };
            softcap(cpu.form, &cpu.team, cap.0, &mut x);
            Ok(())
        })
    }

    /// Write each row's heads, turned by the row's angles, to `out`, dense.
    fn rotate(
        &self,
        py: Python<'_>,
        cos: Number<names::Cos>,
        sin: Number<names::Sin>,
        half: Number<names::Half>,
        x: Number<names::X>,
        rows: Number<names::RowCount>,
        width: Number<names::Width>,
        x_stride: Number<names::XStride>,
        out: Number<names::Out>,
    ) -> Result<()> {
        let (rows, width) = (rows.0, width.0);
        check_divides("half", doubled(&half)?, width)?;
        let cos = Matrix::dense(cos, rows, half.0);
        let sin = Matrix::dense(sin, rows, half.0);
        let x = Matrix::strided(x, (rows, width), x_stride.0);
        let out = Matrix::dense(out, rows, width);
        let cpu = self.cpu.get();
        run_on_numbers(py, out.numbers(), || {
            with_dtype!(self.dtype, E => {
                // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
                let (x, out) = unsafe { (x.rows::<E>()?, out.rows_mut()?) };
                // SAFETY: as above; angles are float32.
                let (cos, sin) = unsafe { (cos.rows()?, sin.rows()?) };
                rotate(cpu.form, &cpu.team, cos, sin, 2 * half.0, x, &out);
            });
            Ok(())
        })
    }
}
