//! Which tables a command line asks for.

use std::collections::HashSet;

use glob::Pattern;

use crate::case::{Case, Dtype, Metric, Mode};

/// One table to be made.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) case: Case,
    /// The sizes of its rows.
    pub(super) sizes: Vec<usize>,
    pub(super) metric: Metric,
    pub(super) mode: Mode,
    pub(super) dtype: Dtype,
}

/// The sizes that are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sizes {
    Quick,
    Full,
    /// As many tokens; on a grid, the length of an axis that has about as many in all.
    Tokens(Vec<usize>),
}

impl Sizes {
    fn of(&self, case: &Case) -> Vec<usize> {
        let mut sizes = match self {
            Self::Quick => case.quick.clone(),
            Self::Full => case.sizes.clone(),
            Self::Tokens(tokens) => {
                let axes = case.axes();
                tokens.iter().map(|&tokens| root(tokens, axes)).collect()
            }
        };
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

/// The whole number whose power comes closest.
fn root(value: usize, power: u32) -> usize {
    let near = (value as f64).powf(1.0 / f64::from(power)).round() as usize;
    near.max(1)
}

/// The tables whose names match one of the globs; all where there is none. `dtypes` replaces the
/// cases' own. A glob that matches none is an error, which names near ones.
pub(super) fn tables(
    cases: &[Case],
    globs: &[String],
    sizes: &Sizes,
    dtypes: &[Dtype],
) -> Result<Vec<Table>, String> {
    let mut all = Vec::new();
    for case in cases {
        let own = [case.dtype];
        for (at, &dtype) in if dtypes.is_empty() { &own[..] } else { dtypes }.iter().enumerate() {
            if dtypes[..at.min(dtypes.len())].contains(&dtype) {
                continue;
            }
            for metric in Metric::ALL {
                for mode in Mode::ALL {
                    let name = case.table(metric, mode, dtype.0);
                    let (case, sizes) = (case.clone(), sizes.of(case));
                    all.push(Table { name, case, sizes, metric, mode, dtype });
                }
            }
        }
    }
    let mut names = HashSet::new();
    if let Some(twice) = all.iter().find(|table| !names.insert(table.name.as_str())) {
        return Err(format!("two cases have tables of the name {:?}", twice.name));
    }
    if globs.is_empty() {
        return Ok(all);
    }
    let mut patterns = Vec::new();
    for text in globs {
        let pattern = Pattern::new(text).map_err(|error| format!("glob {text:?}: {error}"))?;
        if !all.iter().any(|table| pattern.matches(&table.name)) {
            return Err(unknown(text, &all));
        }
        patterns.push(pattern);
    }
    all.retain(|table| patterns.iter().any(|pattern| pattern.matches(&table.name)));
    Ok(all)
}

/// How far a text is from the nearest part of a name, of the same length: what a glob says is a
/// part of a name.
fn distance(part: &str, name: &str) -> usize {
    let name: Vec<char> = name.chars().collect();
    let length = part.chars().count().clamp(1, name.len().max(1));
    let windows = name.windows(length).map(String::from_iter);
    windows.map(|window| strsim::damerau_levenshtein(part, &window)).min().unwrap_or(usize::MAX)
}

fn unknown(text: &str, all: &[Table]) -> String {
    let part = text.trim_matches('*').to_lowercase();
    let mut near: Vec<(usize, &str)> =
        all.iter().map(|table| (distance(&part, &table.name), table.name.as_str())).collect();
    near.sort_by_key(|&(far, _)| far); // stable: equals stay in the order of the tables
    let names: Vec<&str> = near.iter().take(5).map(|&(_, name)| name).collect();
    let names = names.join("\n  ");
    let hint = if near.first().is_some_and(|&(far, _)| far == 0) {
        format!("; a part of a name needs stars around it: '*{part}*'")
    } else {
        String::new()
    };
    format!(
        "no table is named like {text:?}{hint}\nnear matches:\n  {names}\n`fuselane bench --list` shows all"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::builtin;

    fn names(globs: &[&str]) -> Result<Vec<String>, String> {
        let globs: Vec<String> = globs.iter().map(|&glob| glob.to_owned()).collect();
        let tables = tables(&builtin().unwrap(), &globs, &Sizes::Quick, &[])?;
        Ok(tables.into_iter().map(|table| table.name).collect())
    }

    #[test]
    fn globs() {
        assert_eq!(names(&[]).unwrap().len(), 80);
        assert_eq!(names(&["*-speed-*"]).unwrap().len(), 40);
        assert_eq!(names(&["act-*relu*", "*relu*"]).unwrap().len(), 4);
        let one = names(&["act-speed-fwd-batch12-head12-dim128-act_relu-bf16"]).unwrap();
        assert_eq!(one.len(), 1);
        assert_eq!(names(&["*softmax-dim_-2*"]).unwrap().len(), 4);
    }

    #[test]
    fn near_matches() {
        let error = names(&["*act_rleu*"]).unwrap_err();
        assert!(error.contains("act_relu"), "{error}");
        let error = names(&["act_silu"]).unwrap_err();
        assert!(error.contains("'*act_silu*'") && error.contains("--list"), "{error}");
        assert!(names(&["[x"]).unwrap_err().contains("glob"));
    }

    #[test]
    fn sizes() {
        let cases = builtin().unwrap();
        let rows = |sizes: &Sizes| -> usize {
            tables(&cases, &[], sizes, &[]).unwrap().iter().map(|table| table.sizes.len()).sum()
        };
        assert_eq!(rows(&Sizes::Full), 544);
        assert_eq!(rows(&Sizes::Tokens(vec![1024])), 80);
        // On a grid, 1024 and 1025 tokens are one size: 16 of the 80 tables have axes to share.
        assert_eq!(rows(&Sizes::Tokens(vec![1024, 1025, 4096])), 64 * 3 + 16 * 2);
        let grid = tables(&cases, &["*3d*".to_owned()], &Sizes::Tokens(vec![4096]), &[]).unwrap();
        assert!(grid.iter().all(|table| table.sizes == [16]));
    }

    #[test]
    fn names_are_unique() {
        let mut cases = builtin().unwrap();
        cases.push(cases[0].clone());
        let error = tables(&cases, &[], &Sizes::Quick, &[]).unwrap_err();
        assert!(error.contains("act-speed-fwd-batch12-head12-dim128-act_relu-bf16"), "{error}");
        let twice = ["f16".parse().unwrap(), "f16".parse().unwrap()];
        assert_eq!(tables(&builtin().unwrap(), &[], &Sizes::Quick, &twice).unwrap().len(), 80);
    }

    #[test]
    fn dtypes_replace() {
        let f32_only = ["f32".parse().unwrap()];
        let tables = tables(&builtin().unwrap(), &[], &Sizes::Quick, &f32_only).unwrap();
        assert_eq!(tables.len(), 80);
        assert!(tables.iter().all(|table| table.name.contains("-f32")));
    }
}
