//! The Python class `RowOps`: layers without a weight matrix.

use prefixcache_cpu::Element;
use prefixcache_ops::rowwise::{self, Gate};
use pyo3::prelude::*;

use crate::cpu::{Cpu, DType, Matrix, with_dtype};
use crate::errors::out_of_range;

/// Numbers below which a call is over before another thread could use the interpreter.
const DETACH_NUMBERS: usize = 16_384;

/// Norms, gates and rotary positions, row by row, of tensors of one type.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct RowOps {
    cpu: Py<Cpu>,
    dtype: DType,
}

fn run<T: Send>(py: Python<'_>, numbers: usize, work: impl FnOnce() -> T + Send) -> T {
    if numbers < DETACH_NUMBERS {
        work()
    } else {
        py.detach(work)
    }
}

fn check_divides(name: &'static str, part: usize, whole: usize) -> PyResult<()> {
    if part > 0 && whole.is_multiple_of(part) {
        return Ok(());
    }
    Err(out_of_range(
        name,
        format!("must divide {whole}, not be {part}"),
    ))
}

fn doubled(name: &'static str, half: usize) -> PyResult<usize> {
    let twice = half.checked_mul(2);
    twice.ok_or_else(|| out_of_range(name, format!("must be below 2**63, not {half}")))
}

/// # Safety
/// The addresses are those of numbers of type E.
unsafe fn rms_norm<E: Element>(
    cpu: &Cpu,
    x: Matrix,
    weight: Matrix,
    group: usize,
    eps: f32,
    out: Matrix,
) -> PyResult<()> {
    // SAFETY: the caller's promise.
    let (x, weight, out) = unsafe { (x.rows::<E>()?, weight.rows()?, out.rows_mut()?) };
    rowwise::rms_norm(cpu.form, &cpu.team, x, weight.row(0), group, eps, &out);
    Ok(())
}

/// # Safety
/// The addresses are those of numbers of type E.
unsafe fn gated<E: Element>(cpu: &Cpu, gate: Gate, x: Matrix, out: Matrix) -> PyResult<()> {
    // SAFETY: the caller's promise.
    let (x, out) = unsafe { (x.rows::<E>()?, out.rows_mut()?) };
    rowwise::gated(cpu.form, &cpu.team, gate, x, &out);
    Ok(())
}

/// # Safety
/// The addresses are those of numbers of type E, and of float32 for the angles.
unsafe fn rotate<E: Element>(
    cpu: &Cpu,
    cos: Matrix,
    sin: Matrix,
    x: Matrix,
    out: Matrix,
) -> PyResult<()> {
    // SAFETY: the caller's promise.
    let (cos, sin, x, out) = unsafe { (cos.rows()?, sin.rows()?, x.rows::<E>()?, out.rows_mut()?) };
    rowwise::rotate(cpu.form, &cpu.team, cos, sin, x, &out);
    Ok(())
}

#[pymethods]
impl RowOps {
    /// Layers on tensors of type "bfloat16" or "float32".
    #[new]
    fn new(cpu: Py<Cpu>, dtype: &str) -> PyResult<Self> {
        Ok(Self {
            cpu,
            dtype: DType::parse(dtype)?,
        })
    }

    /// Write x / sqrt(mean(x^2) + eps) * weight, for each `group` numbers of a row, to `out`, dense.
    ///
    /// The weight has `weight_width` numbers, a multiple of `group`, and is repeated along a row.
    #[expect(
        clippy::too_many_arguments,
        reason = "addresses and sizes of three tensors"
    )]
    fn rms_norm(
        &self,
        py: Python<'_>,
        x: usize,
        rows: usize,
        width: usize,
        x_stride: usize,
        weight: usize,
        weight_width: usize,
        group: usize,
        eps: f32,
        out: usize,
    ) -> PyResult<()> {
        check_divides("group", group, weight_width)?;
        check_divides("weight_width", weight_width, width)?;
        let x = Matrix {
            name: "x",
            address: x,
            rows,
            width,
            stride: x_stride,
        };
        let weight = Matrix::dense("weight", weight, 1, weight_width);
        let out = Matrix::dense("out", out, rows, width);
        let cpu = self.cpu.get();
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        run(py, out.numbers(), || unsafe {
            with_dtype!(self.dtype, E => rms_norm::<E>(cpu, x, weight, group, eps, out))
        })
    }

    /// Write gate(x[:width]) * x[width:] for rows of 2 * width numbers to `out`, dense.
    ///
    /// The gate is "silu" or "gelu_tanh".
    #[expect(
        clippy::too_many_arguments,
        reason = "addresses and sizes of two tensors"
    )]
    fn gated(
        &self,
        py: Python<'_>,
        gate: &str,
        x: usize,
        rows: usize,
        width: usize,
        x_stride: usize,
        out: usize,
    ) -> PyResult<()> {
        let gate = match gate {
            "silu" => Gate::Silu,
            "gelu_tanh" => Gate::GeluTanh,
            other => {
                let reason = format!("must be \"silu\" or \"gelu_tanh\", not {other:?}");
                return Err(out_of_range("gate", reason));
            }
        };
        let x = Matrix {
            name: "x",
            address: x,
            rows,
            width: doubled("width", width)?,
            stride: x_stride,
        };
        let out = Matrix::dense("out", out, rows, width);
        let cpu = self.cpu.get();
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        run(py, out.numbers(), || unsafe {
            with_dtype!(self.dtype, E => gated::<E>(cpu, gate, x, out))
        })
    }

    /// Write each row's heads, turned by the row's angles, to `out`, dense.
    ///
    /// `cos` and `sin` are dense float32 of `half` numbers a row; a head has 2 * half.
    #[expect(
        clippy::too_many_arguments,
        reason = "addresses and sizes of four tensors"
    )]
    fn rotate(
        &self,
        py: Python<'_>,
        cos: usize,
        sin: usize,
        half: usize,
        x: usize,
        rows: usize,
        width: usize,
        x_stride: usize,
        out: usize,
    ) -> PyResult<()> {
        check_divides("half", doubled("half", half)?, width)?;
        let cos = Matrix::dense("cos", cos, rows, half);
        let sin = Matrix::dense("sin", sin, rows, half);
        let x = Matrix {
            name: "x",
            address: x,
            rows,
            width,
            stride: x_stride,
        };
        let out = Matrix::dense("out", out, rows, width);
        let cpu = self.cpu.get();
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        run(py, out.numbers(), || unsafe {
            with_dtype!(self.dtype, E => rotate::<E>(cpu, cos, sin, x, out))
        })
    }
}
