//! The figures that were published for GPUs, which the report shows beside ours.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde::Deserialize;

const FILE: &str = include_str!("../cases/published.csv");

/// One row of a published table: ms or MiB.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Published {
    table: String,
    n: usize,
    pub(crate) gpu: String,
    pub(crate) fused: Option<f64>,
    pub(crate) fused_cached: Option<f64>,
    pub(crate) eager: Option<f64>,
    pub(crate) compiled: Option<f64>,
}

impl Published {
    /// How many times as fast (or small) the fused kernel was as eager PyTorch.
    pub(crate) fn eager_over_fused(&self) -> Option<f64> {
        ratio(self.eager?, self.fused?)
    }

    /// As `eager_over_fused`, but against torch.compile.
    pub(crate) fn compiled_over_fused(&self) -> Option<f64> {
        ratio(self.compiled?, self.fused?)
    }
}

/// None where a published time or size is 0.
fn ratio(other: f64, fused: f64) -> Option<f64> {
    (other > 0.0 && fused > 0.0).then(|| other / fused)
}

static ROWS: LazyLock<HashMap<(String, usize), Published>> = LazyLock::new(|| {
    let rows = rows().expect("a test reads the file, which is part of the program");
    rows.into_iter().map(|row| ((row.table.clone(), row.n), row)).collect()
});

fn rows() -> Result<Vec<Published>, csv::Error> {
    csv::ReaderBuilder::new()
        .comment(Some(b'#'))
        .from_reader(FILE.as_bytes())
        .deserialize()
        .collect()
}

/// The published row of this table and size.
pub(crate) fn find(table: &str, n: usize) -> Option<&'static Published> {
    ROWS.get(&(table.to_owned(), n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn report_published_figures() {
        let rows = rows().unwrap();
        assert_eq!(rows.len(), 544);
        assert_eq!(ROWS.len(), 544, "a table has a size twice");
        let tables: BTreeSet<_> = rows.iter().map(|row| &row.table).collect();
        assert_eq!(tables.len(), 80);
        assert_eq!(rows.iter().map(|row| row.n).sum::<usize>(), 4168032);
        let figures = rows.iter().flat_map(|r| [r.fused, r.fused_cached, r.eager, r.compiled]);
        let sum: f64 = figures.flatten().sum();
        assert!((sum - 1421227.5158259952).abs() < 1e-6, "{sum}");
        for row in &rows {
            let h100 = row.table.starts_with("act-") || row.table.starts_with("layernorm-");
            assert_eq!(row.gpu, if h100 { "H100" } else { "A800" }, "{}", row.table);
        }
    }

    #[test]
    fn report_published_row() {
        let row = find("act-speed-fwd-batch12-head12-dim128-act_relu-bf16", 256).unwrap();
        assert_eq!(row.eager_over_fused(), Some(0.014025 / 0.043131));
        assert_eq!(find("act", 256), None);
    }
}
