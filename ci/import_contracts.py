"""A contract type of import-linter: no files of a package import each other in a circle.

import-linter's own `acyclic_siblings` compares packages by their names, so that two packages that import from each
other break it without any circle of files.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from grimp import ImportGraph
from importlinter.application import contract_utils, output
from importlinter.application.contract_utils import AlertLevel
from importlinter.domain import fields
from importlinter.domain.contract import Contract, ContractCheck


class NoCircles(Contract):
    """Fails for a circle of imports between the files of `packages`, those under TYPE_CHECKING included."""

    type_name = "no_circles"

    packages = fields.ListField(subfield=fields.StringField())
    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)
    unmatched_ignore_imports_alerting = fields.EnumField(AlertLevel, default=AlertLevel.ERROR)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        removed = contract_utils.remove_ignored_imports_and_report(
            graph=graph,
            ignore_imports=self.ignore_imports,
            unmatched_alerting=self.unmatched_ignore_imports_alerting,
        )
        packages = {str(name) for name in self.packages}
        modules = sorted(module for module in graph.modules if module.partition(".")[0] in packages)
        imports = {module: sorted(graph.find_modules_directly_imported_by(module)) for module in modules}
        circle: list[str] = []
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as e:
            circle = e.args[1][::-1]  # graphlib names each module before its importer
        return ContractCheck(
            kept=not circle,
            warnings=list(removed.warnings),
            ignored_import_count=removed.ignored_import_count,
            metadata={"circle": circle},
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        output.print_error("These files import each other in a circle:")
        output.print_error("  " + "\n  -> ".join(check.metadata["circle"]), bold=False)
