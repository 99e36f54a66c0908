"""Sky Computing's experiment (Zhu, Li and You 2022, arXiv 2202.11836): records, formulas, tables, plot."""
