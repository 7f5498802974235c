"""Everything that only a report needs: what was compared, differences, figures and the page."""
