package weave

import (
	"fmt"
	"go/ast"
)

// ClientField adds a field to the client's struct.
func (f *File) ClientField(clientType, name, fieldType string) error {
	spec := f.types[clientType]
	if spec != nil {
		if client, ok := spec.Type.(*ast.StructType); ok {
			f.insert(client.Fields.Closing, fmt.Sprintf("\n\t%s %s\n", name, fieldType))
			return nil
		}
	}
	return fmt.Errorf("no struct %s was found in oapi-codegen's output, so its calls would carry no key; if user-templates replace its template, they must keep it", clientType)
}

// Key makes a client method attach the key before the request editors run, and
// send the request through the call that this began.
func (f *File) Key(clientType, method, field, operation string) error {
	for _, fn := range f.named[method] {
		if !isReceiver(fn, clientType) {
			continue
		}
		client := fn.Recv.List[0].Names[0].Name
		call := freeIn(fn, "call")
		bound, sent := false, false
		for _, statement := range fn.Body.List {
			switch statement := statement.(type) {
			case *ast.AssignStmt:
				if f.text(statement) == "req = req.WithContext(ctx)" {
					f.insert(statement.End(), fmt.Sprintf("\n\t%s := %s.%s.Start(&%s, req)", call, client, field, operation))
					bound = true
				}
			case *ast.ReturnStmt:
				if len(statement.Results) == 1 && f.text(statement.Results[0]) == client+".Client.Do(req)" {
					f.replace(statement.Results[0].Pos(), statement.Results[0].End(), fmt.Sprintf("%s.Do(%s.Client)", call, client))
					sent = true
				}
			}
		}
		if bound && sent {
			return nil
		}
	}
	return fmt.Errorf("%s has no method %s that sends its request as oapi-codegen's does, so its calls would carry no key; if user-templates replace its template, they must keep `req = req.WithContext(ctx)` and `return c.Client.Do(req)`", clientType, method)
}

func isReceiver(fn *ast.FuncDecl, name string) bool {
	if fn.Recv == nil || len(fn.Recv.List[0].Names) == 0 {
		return false
	}
	pointer, ok := fn.Recv.List[0].Type.(*ast.StarExpr)
	return ok && isIdent(pointer.X, name)
}
